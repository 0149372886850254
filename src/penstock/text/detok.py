"""One answer's tokens to text, as they come."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from penstock.text.tokenizer import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class TextStream:
    """Pushes give the same text as decoding all tokens at once, however they are cut, up to the stop string that ends
    first (of those ending together, the longest). Held back: characters whose bytes have not all come, and what may
    be the beginning of a stop string. `continuing`: the text goes on from another, so a first space is part of it.
    `shown` are special tokens that are part of the text all the same."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        keep_special: bool = False,
        continuing: bool = False,
        shown: Collection[int] = (),
    ) -> None:
        self.stopped: str | None = None  # the stop string that was met
        self.consumed = 0  # tokens pushed, up to and with the one that completed it
        self._spell = tokenizer.token_bytes
        self._stop = tuple(stop)
        self._hidden = frozenset() if keep_special else tokenizer.special_ids.difference(shown)
        self._drop_space = tokenizer.prefix_space and not continuing
        self._decoder = _utf8_decoder("replace")
        self._held = ""

    def push(self, tokens: Sequence[int]) -> str:
        """The new text that is safe to show."""
        if not self._stop and not self._drop_space:
            self.consumed += len(tokens)
            spelled = [self._spell(token) for token in tokens if token not in self._hidden]
            return self._decoder.decode(b"".join(spelled))
        shown = ""
        for token in tokens:
            if self.stopped is not None:
                break
            self.consumed += 1
            if token not in self._hidden:
                shown += self._show(self._decoder.decode(self._bytes(token)))
        return shown

    def finish(self) -> str:
        """What was still held back; bytes that make no character become U+FFFD."""
        if self.stopped is not None:
            return ""
        shown = self._show(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return shown

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
            _, cut, self.stopped = min(met)
            self._held = ""
        else:
            cut = min(beginning(stop, text) for stop in self._stop)
            self._held = text[cut:]
        return text[:cut]


def beginning(stop: str, text: str) -> int:
    """Where the longest end of `text` that begins `stop` starts; its own end where there is none."""
    at = max(0, len(text) - len(stop) + 1)
    while (at := text.find(stop[0], at)) >= 0 and not stop.startswith(text[at:]):
        at += 1
    return at if at >= 0 else len(text)
