"""Triton kernels, one to a file, each with the function that launches it on torch tensors."""
