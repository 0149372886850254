"""What one model makes of text: its tokenizer and its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import InvalidRequest
from penstock.text.chat import ChatTemplate, Message, templates_in_folder, templates_in_metadata
from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Text:
    tokenizer: Tokenizer
    template: ChatTemplate | None

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Text:
        return cls._of(Tokenizer.from_gguf(metadata), templates_in_metadata(metadata))

    @classmethod
    def from_folder(cls, path: Path) -> Text:
        return cls._of(Tokenizer.from_folder(path), templates_in_folder(path))

    @classmethod
    def _of(cls, tokenizer: Tokenizer, templates: dict[str, str]) -> Text:
        return cls(tokenizer, ChatTemplate(templates, tokenizer.names) if templates else None)

    def encode_chat(self, messages: Sequence[Message], **kwargs: Any) -> list[int]:
        """The prompt for the next answer; `kwargs` go to the template."""
        return self.encode_prompt(self.render_chat(messages, **kwargs))

    def render_chat(self, messages: Sequence[Message], **kwargs: Any) -> str:
        if self.template is None:
            raise InvalidRequest(
                "this model has no chat template; send it a plain prompt through completions instead", param="messages"
            )
        return self.template.render(messages, **kwargs)

    def encode_prompt(self, text: str) -> list[int]:
        """Special tokens may be spelled out in the text; a BOS is put before it when the model wants one."""
        return self.tokenizer.encode(text, special=True, bos=True)
