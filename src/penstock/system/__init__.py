"""Wraps process-wide features of Python and the operating system."""
