"""Says what one rendering may take."""

from __future__ import annotations

MAX_CHARACTERS = 2**22  # of one text to encode: the regular expressions of tokenizers fail not far above
CPU_SECONDS = 2.0  # of one rendering, which usually takes a millisecond
WALL_SECONDS = 20.0  # that a rendering may take on a busy machine
MEMORY = 512 * 2**20  # bytes of address space of a rendering process: Python and Jinja take a tenth of it
