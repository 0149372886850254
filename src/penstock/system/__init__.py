"""Reaches the parts of Python and the operating system that belong to the whole process."""
