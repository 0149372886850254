"""Holds the arguments of a tool call as templates expect them."""

from __future__ import annotations

import json
from typing import Any


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
