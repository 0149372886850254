"""A model's chat template: messages to the prompt text it was trained on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import InvalidRequest, MalformedFile
from penstock.text.hf_tokenizer import read_json
from penstock.text.tool_formats import PLAIN, Format, family_of, reasoning_of
from penstock.text.tools import Message, describe, narrate

if TYPE_CHECKING:
    from penstock.text.template import Template


class Renders(Protocol):
    def render(self, given: Mapping[str, Any]) -> str: ...


class ChatTemplate:
    """`sources` are templates by name: "default", and "tool_use" where a model has one apart for tools. `tokens` are
    the special tokens a template may name: bos_token, eos_token and so on."""

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, str], family: str | None = None) -> None:
        """`family`: the one that tool calls are written as, where the template's own markers mislead."""
        self._sources = sources
        self._tokens = tokens
        self._compiled: dict[str, Template] = {}
        source = sources.get("tool_use", "") + sources.get("default", "")
        found = family_of(source, family)
        if not self.reads("tools"):
            found = replace(found, calls=(*found.calls, *PLAIN.calls))  # as the words say that describe them
        self.format = Format(found, reasoning_of(source))
        self._null_content = re.search(r"content\W* is (not )?none", source) is not None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        if not self.reads("tool_calls"):
            messages = narrate(messages)
        if tools and not self.reads("tools"):
            messages, tools = describe(tools, messages), None
        given = {"documents": None, **self._tokens, **kwargs}
        given |= {"add_generation_prompt": add_generation_prompt, "tools": tools or None}
        template = self._template("tool_use" if tools and "tool_use" in self._sources else "default")
        if self._null_content and any(message["content"] is None for message in messages):
            with suppress(InvalidRequest):
                return template.render({**given, "messages": messages})
        return template.render({**given, "messages": [_with_content(message) for message in messages]})

    def reads(self, name: str) -> bool:
        """Whether a template looks at what is given by this name: one that does not would drop it in silence."""
        return any(re.search(rf"\b{re.escape(name)}\b", source) for source in self._sources.values())

    def _template(self, name: str) -> Renders:
        from penstock.text.template import Template  # Jinja is slow to import, and plain prompts need none

        if name not in self._sources:
            raise InvalidRequest(f"the model has no default chat template, only {', '.join(self._sources)}")
        if name not in self._compiled:
            self._compiled[name] = Template(self._sources[name])
        return self._compiled[name]


def _with_content(message: Message) -> Message:
    return message if message["content"] is not None else {**message, "content": ""}


def templates_in_metadata(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    sources = {other.removeprefix(f"{key}."): metadata[other] for other in metadata if other.startswith(f"{key}.")}
    if key in metadata:
        sources["default"] = metadata[key]
    return _checked(sources, "the file's metadata")


def templates_in_folder(path: Path) -> dict[str, str]:
    """A chat_template.jinja, or else what tokenizer_config.json holds: one template, or a list of named ones."""
    alone = path / "chat_template.jinja"
    if alone.exists():
        return {"default": alone.read_text("utf-8")}
    given = read_json(path / "tokenizer_config.json").get("chat_template")
    if not isinstance(given, list):
        return _checked({"default": given}, "tokenizer_config.json")
    try:
        return _checked({entry["name"]: entry["template"] for entry in given}, "tokenizer_config.json")
    except (TypeError, KeyError):
        raise MalformedFile("a list of chat templates in tokenizer_config.json needs name and template") from None


def _checked(sources: Mapping[str, Any], place: str) -> dict[str, str]:
    given = {name: source for name, source in sources.items() if source is not None}
    for name, source in given.items():
        if not isinstance(source, str):
            raise MalformedFile(f"chat template {name!r} in {place} must be a string; got {type(source).__name__}")
    return given
