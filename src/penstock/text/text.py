"""Puts a model's tokenizer and chat template together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import InvalidRequest
from penstock.text.chat import ChatTemplate, templates_in_folder, templates_in_metadata
from penstock.text.pairs import PairTemplate, pair_template
from penstock.text.tokenizer import Tokenizer
from penstock.text.tool_formats import PLAIN, AnswerFormat
from penstock.text.tools import MessageDict


class ChatPrompt(NamedTuple):
    """Holds a rendered chat."""

    tokens: list[int]
    opened: bool = False  # the answer begins within reasoning


@dataclass(frozen=True, slots=True)
class Text:
    """Turns text and chats into the token ids of one model."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    pair_template: PairTemplate | None = None  # of a generative reranker

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Text:
        return cls._of(Tokenizer.from_gguf(metadata), templates_in_metadata(metadata))

    @classmethod
    def from_folder(cls, path: Path) -> Text:
        return cls._of(Tokenizer.from_folder(path), templates_in_folder(path), path)

    @classmethod
    def _of(cls, tokenizer: Tokenizer, templates: dict[str, str], path: Path | None = None) -> Text:
        chat = ChatTemplate(templates, tokenizer.names) if templates else None
        return cls(tokenizer, chat, pair_template(templates, tokenizer.names, path))

    def with_template(self, template: ChatTemplate) -> Text:
        return replace(self, template=template)

    @property
    def format(self) -> AnswerFormat:
        """Returns how the model writes answers in a chat."""
        return AnswerFormat(PLAIN) if self.template is None else self.template.format

    def takes(self, name: str) -> bool:
        """Returns whether the chat template uses the variable."""
        return self.template is not None and self.template.reads(name)

    def chat_prompt(self, messages: Sequence[MessageDict], **kwargs: Any) -> ChatPrompt:
        """Returns the prompt for the next answer; `kwargs` go to the template."""
        prompt = self.render_chat(messages, **kwargs)
        return ChatPrompt(self.encode_prompt(prompt), self.format.opened(prompt))

    def encode_chat(self, messages: Sequence[MessageDict], **kwargs: Any) -> list[int]:
        return self.chat_prompt(messages, **kwargs).tokens

    def render_chat(self, messages: Sequence[MessageDict], **kwargs: Any) -> str:
        if self.template is None:
            raise InvalidRequest(
                "this model has no chat template: send a plain prompt to completions instead", param="messages"
            )
        return self.template.render(messages, **kwargs)

    def special_in(self, *markers: str) -> frozenset[int]:
        """Returns the special tokens whose text is part of one of the markers."""
        return _special_in(self.tokenizer, markers)

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the tokens of a prompt. The text of a special token becomes that token; BOS is added if the model
        uses it."""
        return self.tokenizer.encode(text, special=True, bos=True)

    def encode_whole(self, text: str) -> list[int]:
        """Returns the tokens of a complete text, with the tokens that the model expects at its end."""
        return [*self.encode_prompt(text), *self.tokenizer.closing]


@lru_cache(maxsize=64)
def _special_in(tokenizer: Tokenizer, markers: tuple[str, ...]) -> frozenset[int]:
    spelled = {id: tokenizer.token_text(id) for id in tokenizer.special_ids}
    return frozenset(id for id, text in spelled.items() if text and any(text in marker for marker in markers))
