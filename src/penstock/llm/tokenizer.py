"""Offers a model's tokenizer with the most common methods of Hugging Face's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.text import Text
from penstock.text.tools import MessageDict


class ModelTokenizer:
    """Turns text into token ids and back, and chats into prompts."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._tokenizer = text.tokenizer

    @property
    def eos_token_id(self) -> int | None:
        return min(self._tokenizer.eos_ids, default=None)

    @property
    def bos_token_id(self) -> int | None:
        return self._tokenizer.bos_id

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encodes a text; `add_special_tokens` adds those that the model expects."""
        if add_special_tokens:
            return self._text.encode_whole(text)
        return self._tokenizer.encode(text, special=True)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._tokenizer.decode(ids, special=not skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[MessageDict],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str | list[int]:
        """Renders a chat as token ids or text; `variables` go to the template."""
        rendered = self._text.render_chat(conversation, add_generation_prompt=add_generation_prompt, **variables)
        return self._text.encode_prompt(rendered) if tokenize else rendered
