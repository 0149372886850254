"""Combines a model's tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.text.chat import ChatTemplate, templates_in_folder, templates_in_metadata
from penstock.text.named_templates import CHATML
from penstock.text.ollama_template import OllamaTemplate
from penstock.text.pairs import PairTemplate, pair_template
from penstock.text.sampling_defaults import FALLBACK, defaults_in_folder, defaults_in_metadata, with_given
from penstock.text.tokenizer import Tokenizer
from penstock.text.tool_formats import AnswerFormat
from penstock.text.tools import MessageDict
from penstock.types import SamplingParams

if TYPE_CHECKING:
    from penstock.templates.process import RenderProcess


class ChatPrompt(NamedTuple):
    """Holds a rendered chat."""

    tokens: list[int]
    opened: bool = False  # the answer begins within reasoning


@dataclass(frozen=True, slots=True)
class Text:
    """Turns text and chats into the token ids of one model."""

    tokenizer: Tokenizer
    template: ChatTemplate | None  # None: the model has none, and its chats are rendered as ChatML
    sampling_defaults: Mapping[str, Any] = field(default_factory=lambda: FALLBACK, compare=False)
    pair_template: PairTemplate | None = None  # generative rerankers only
    preamble: tuple[MessageDict, ...] = ()  # messages at the beginning of every chat

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Text:
        text = cls._of(Tokenizer.from_gguf(metadata), templates_in_metadata(metadata))
        return text.with_sampling(defaults_in_metadata(metadata))

    @classmethod
    def from_folder(cls, path: Path) -> Text:
        text = cls._of(Tokenizer.from_folder(path), templates_in_folder(path), path)
        return text.with_sampling(defaults_in_folder(path))

    @classmethod
    def _of(cls, tokenizer: Tokenizer, templates: dict[str, str], path: Path | None = None) -> Text:
        chat = ChatTemplate(templates, tokenizer.names) if templates else None
        return cls(tokenizer, chat, pair_template=pair_template(templates, tokenizer.names, path))

    def with_sampling(self, defaults: Mapping[str, Any]) -> Text:
        return replace(self, sampling_defaults=with_given(self.sampling_defaults, defaults))

    def sampling(self, **given: Any) -> SamplingParams:
        """Returns the sampling of a request: its fields that are not None, else the defaults. Without max_tokens, an
        answer may fill the context.
        """
        stated = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**{"max_tokens": None, **with_given(self.sampling_defaults, stated)})

    def with_preamble(self, messages: Sequence[MessageDict]) -> Text:
        return replace(self, preamble=tuple(messages))

    def with_template(self, template: ChatTemplate) -> Text:
        return replace(self, template=template)

    def with_template_text(self, source: str) -> Text:
        """Returns a copy with this Jinja template. As in llama.cpp, for which such templates are written, thinking is
        on unless a request disables it.
        """
        return self.with_template(ChatTemplate({"default": source}, {**self.tokenizer.names, "enable_thinking": True}))

    def isolated(self, process: RenderProcess) -> Text:
        pairs = self.pair_template and self.pair_template.isolated(process)
        return replace(self, template=self.template and self.template.isolated(process), pair_template=pairs)

    @property
    def chat_template(self) -> ChatTemplate:
        return _chatml(self.tokenizer) if self.template is None else self.template

    @property
    def format(self) -> AnswerFormat:
        return self.chat_template.format

    def takes(self, name: str) -> bool:
        return self.chat_template.reads(name)

    def chat_prompt(self, messages: Sequence[MessageDict], **kwargs: Any) -> ChatPrompt:
        """Renders a prompt for the next answer; `kwargs` go to the template."""
        prompt = self.render_chat(messages, **kwargs)
        return ChatPrompt(self.encode_prompt(prompt), self.format.opened(prompt))

    def encode_chat(self, messages: Sequence[MessageDict], **kwargs: Any) -> list[int]:
        return self.chat_prompt(messages, **kwargs).tokens

    def render_chat(self, messages: Sequence[MessageDict], **kwargs: Any) -> str:
        return self.chat_template.render(self._after_preamble(messages), **kwargs)

    def _after_preamble(self, messages: Sequence[MessageDict]) -> Sequence[MessageDict]:
        if not self.preamble or not messages:
            return messages
        if messages[0]["role"] != "system":
            return [*self.preamble, *messages]
        begun = [message for message in self.preamble if message["role"] != "system"]
        return [messages[0], *begun, *messages[1:]]

    def special_in(self, *markers: str) -> frozenset[int]:
        return _special_in(self.tokenizer, markers)

    def encode_prompt(self, text: str) -> list[int]:
        """Encodes a prompt. Texts of special tokens become those tokens; BOS is added if the model uses it."""
        return self.tokenizer.encode(text, special=True, bos=True)

    def encode_whole(self, text: str) -> list[int]:
        """Encodes a complete text, including the model's closing tokens."""
        return [*self.encode_prompt(text), *self.tokenizer.closing]


@lru_cache(maxsize=8)
def _chatml(tokenizer: Tokenizer) -> ChatTemplate:
    """Returns the template for models without one, as in llama.cpp's server."""
    return ChatTemplate({"default": CHATML}, tokenizer.names)


@lru_cache(maxsize=64)
def _special_in(tokenizer: Tokenizer, markers: tuple[str, ...]) -> frozenset[int]:
    spelled = {id: tokenizer.token_text(id) for id in tokenizer.special_ids}
    return frozenset(id for id, text in spelled.items() if text and any(text in marker for marker in markers))


def with_modelfile(
    text: Text, system: str, template: str, messages: Sequence[MessageDict], sampling: Mapping[str, Any]
) -> Text:
    """Returns the text side of a model derived by a Modelfile. A request's own fields take precedence."""
    text = text.with_sampling(sampling)
    if template:
        text = text.with_template(OllamaTemplate(template))
    return text.with_preamble([*([{"role": "system", "content": system}] if system else []), *messages])
