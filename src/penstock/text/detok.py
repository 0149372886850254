"""Decodes the tokens of one answer incrementally."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from penstock.text.tokenizer import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class TextStream:
    """Decodes tokens to the same text as decoding them all at once, regardless of how they are split into pushes, up to
    the first stop string to end (the longest, if several end together). Incomplete characters and possible beginnings
    of a stop string are held back. `continuing`: the text continues another one and keeps its leading space. `shown`
    are special tokens that are part of the text. `include_stop`: the text includes the stop string or stop token.
    """

    __slots__ = (
        "_decoder",
        "_drop_space",
        "_held",
        "_hidden",
        "_spell",
        "_stop",
        "_within",
        "consumed",
        "include_stop",
        "may_stop",
        "stopped",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        keep_special: bool = False,
        continuing: bool = False,
        shown: Collection[int] = (),
        include_stop: bool = False,
    ) -> None:
        self.stopped: str | None = None  # the stop string that ended the text
        self.may_stop = bool(stop)  # a stop string may end the text
        self.consumed = 0  # tokens pushed, up to the one that completed the stop string
        self.include_stop = include_stop
        self._spell = tokenizer.token_bytes
        self._stop = tuple(stop)
        hidden = frozenset[int]() if keep_special else tokenizer.special_ids
        self._hidden = hidden.difference(shown) if shown else hidden  # all streams share one set
        self._drop_space = tokenizer.prefix_space and not continuing
        self._decoder = _utf8_decoder("replace")
        self._held = ""
        self._within = False  # the decoder may hold an incomplete character

    def push(self, tokens: Sequence[int]) -> str:
        if not self.may_stop and not self._drop_space:
            self.consumed += len(tokens)
            return self._decode(b"".join([self._spell(token) for token in tokens if token not in self._hidden]))
        shown = ""
        for token in tokens:
            if self.stopped is not None:
                break
            self.consumed += 1
            if token not in self._hidden:
                shown += self._show(self._decode(self._bytes(token)))
        return shown

    def finish(self) -> str:
        """Returns the held-back text; invalid bytes become U+FFFD."""
        if self.stopped is not None:
            return ""
        shown = self._show(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return shown

    def _decode(self, data: bytes) -> str:
        """Returns the complete characters. Most tokens are whole characters and skip the decoder."""
        if not self._within:
            try:
                return data.decode()
            except UnicodeDecodeError:
                self._within = True
        text = self._decoder.decode(data)
        self._within = bool(self._decoder.getstate()[0])
        return text

    def _bytes(self, token: int) -> bytes:
        piece = self._spell(token)
        if piece and self._drop_space:
            self._drop_space = False
            return piece.removeprefix(b" ")
        return piece

    def _show(self, text: str) -> str:
        if not self._stop or not text:
            return text
        text = self._held + text
        met = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if met:
            end, cut, self.stopped = min(met)
            cut = end if self.include_stop else cut
            self._held = ""
        else:
            cut = min(partial_match(stop, text) for stop in self._stop)
            self._held = text[cut:]
        return text[:cut]


def partial_match(stop: str, text: str) -> int:
    """Returns the start of the longest suffix of `text` that is a prefix of `stop`, or the length of `text`."""
    at = max(0, len(text) - len(stop) + 1)
    while (at := text.find(stop[0], at)) >= 0 and not stop.startswith(text[at:]):
        at += 1
    return at if at >= 0 else len(text)
