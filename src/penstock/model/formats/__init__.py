"""Reads quantized checkpoints of Hugging Face folders: each format has a file, and checkpoint.py chooses one."""
