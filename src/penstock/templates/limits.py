"""Defines the limits of one rendering."""

from __future__ import annotations

MAX_CHARACTERS = 2**22  # text to encode; the tokenizers' regular expressions fail not far above
CPU_SECONDS = 2.0  # one rendering, which usually takes a millisecond
WALL_SECONDS = 20.0  # one rendering on a busy machine
MEMORY = 512 * 2**20  # bytes of a rendering process's address space; Python and Jinja take a tenth
