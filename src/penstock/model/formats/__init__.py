"""Quantized checkpoints of Hugging Face folders, one file for each format; checkpoint.py finds out which one it is."""
