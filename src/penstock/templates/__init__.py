"""Renders Jinja chat templates, which are untrusted programs: in a sandbox, and in a process that can be killed.

The import is cheap, because every rendering process runs it.
"""

from __future__ import annotations

import json
from typing import Any

MAX_CHARACTERS = 2**22  # text to encode; the tokenizers' regular expressions fail not far above
CPU_SECONDS = 2.0  # one rendering, which usually takes a millisecond
WALL_SECONDS = 20.0  # one rendering on a busy machine
MEMORY = 512 * 2**20  # bytes of a rendering process's address space; Python and Jinja take a tenth


class CallArguments(dict[str, Any]):
    """Holds the arguments of a call. Some templates iterate over them or write them as JSON, others insert them as
    text, which is then JSON.
    """

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)
