"""Stores files and batches, and runs the lines of batches."""
