"""Renders messages to prompt text with a model's chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import InvalidRequest, MalformedFile
from penstock.text.hf_tokenizer import read_json
from penstock.text.named_templates import TEMPLATES
from penstock.text.tool_formats import PLAIN, AnswerFormat, find_tool_format, reasoning_of
from penstock.text.tools import MessageDict, calls_as_text, describe

if TYPE_CHECKING:
    from penstock.templates.process import RenderProcess

XML_TOOLS = "xml_tools"  # SmolLM3's variable for functions called in XML


class Renderer(Protocol):
    """Renders a prompt from a template's variables."""

    def render(self, given: Mapping[str, Any]) -> str: ...


class ChatTemplate:
    """Renders chats with the named templates in `sources`: "default" and optionally "tool_use". `tokens` are special
    tokens that templates may use (bos_token, eos_token and so on) and other default variables.
    """

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, Any], family: str | None = None) -> None:
        """`family` overrides the tool format where the template's markers are misleading."""
        self._sources = sources
        self._tokens = tokens
        self._compiled: dict[str, Renderer] = {}
        self.process: RenderProcess | None = None  # renders; None: this process does
        source = sources.get("tool_use", "") + sources.get("default", "")
        found = find_tool_format(source, family)
        if not (self.reads("tools") or self.reads(XML_TOOLS) or found.prompt):
            found = replace(found, calls=(*found.calls, *PLAIN.calls))  # the syntax that `describe` teaches the model
        self.format = AnswerFormat(found, found.reasoning or reasoning_of(source))
        self._null_content = re.search(r"content\W* is (not )?none", source) is not None

    def render(
        self,
        messages: Sequence[MessageDict],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Renders a prompt; other keyword arguments become template variables."""
        if not self.reads("tool_calls"):
            messages = self._calls_as_text(messages)
        if tools and not self.reads("tools"):
            if self.reads(XML_TOOLS):
                kwargs = {XML_TOOLS: [tool["function"] for tool in tools], **kwargs}
            else:
                messages = describe(tools, messages, self.format.tool_format.prompt)
            tools = None
        given = {"documents": None, **self._tokens, **kwargs}
        given |= {"add_generation_prompt": add_generation_prompt, "tools": tools or None}
        template = self._template("tool_use" if tools and "tool_use" in self._sources else "default")
        if self._null_content and any(message["content"] is None for message in messages):
            with suppress(InvalidRequest):
                return template.render({**given, "messages": messages})
        return template.render({**given, "messages": [_with_content(message) for message in messages]})

    def isolated(self, process: RenderProcess) -> ChatTemplate:
        """Returns a copy that renders in a process that can be killed. Penstock's own templates still render here: each
        is a fixed text with one loop over the messages. Other templates are untrusted, since bounding their cost would
        require knowledge of all Jinja filters and Python methods, and the process costs a tenth of a millisecond.
        """
        twin = copy(self)
        if not set(self._sources.values()) <= set(TEMPLATES.values()):
            twin.process, twin._compiled = process, {}
        return twin

    @property
    def source(self) -> str:
        """Returns the Jinja source for chats without tools."""
        return self._sources.get("default", "")

    def _calls_as_text(self, messages: Sequence[MessageDict]) -> list[MessageDict]:
        if not self.reads(XML_TOOLS):
            return calls_as_text(messages)
        opening, closing = self.format.tool_format.calls[0].section
        return calls_as_text(messages, (f"{opening}\n", f"\n{closing}"), results=False)

    def reads(self, name: str) -> bool:
        """Returns True if a template uses this variable; otherwise its value would be dropped silently."""
        return any(re.search(rf"\b{re.escape(name)}\b", source) for source in self._sources.values())

    def _template(self, name: str) -> Renderer:
        if name not in self._sources:
            raise InvalidRequest(f"the model has no default chat template; it has {', '.join(self._sources)}")
        if name not in self._compiled:
            self._compiled[name] = _renderer(self._sources[name], self.process)
        return self._compiled[name]


def _renderer(source: str, process: RenderProcess | None) -> Renderer:
    """Returns a renderer, imported on demand because plain prompts need none."""
    if process is None:
        from penstock.templates.template import Template

        return Template(source)
    from penstock.templates.process import IsolatedTemplate

    return IsolatedTemplate(source, process)


def _with_content(message: MessageDict) -> MessageDict:
    return message if message["content"] is not None else {**message, "content": ""}


def templates_in_metadata(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    sources = {other.removeprefix(f"{key}."): metadata[other] for other in metadata if other.startswith(f"{key}.")}
    if key in metadata:
        sources["default"] = metadata[key]
    return _checked(sources, "the file's metadata")


def templates_in_folder(path: Path) -> dict[str, str]:
    """Returns a Hugging Face folder's templates by name: chat_template.jinja, or else those in
    tokenizer_config.json.
    """
    alone = path / "chat_template.jinja"
    if alone.exists():
        return {"default": alone.read_text("utf-8")}
    given = read_json(path / "tokenizer_config.json").get("chat_template")
    if not isinstance(given, list):
        return _checked({"default": given}, "tokenizer_config.json")
    try:
        return _checked({entry["name"]: entry["template"] for entry in given}, "tokenizer_config.json")
    except (TypeError, KeyError):
        raise MalformedFile("every chat template listed in tokenizer_config.json needs name and template") from None


def _checked(sources: Mapping[str, Any], place: str) -> dict[str, str]:
    given = {name: source for name, source in sources.items() if source is not None}
    for name, source in given.items():
        if not isinstance(source, str):
            raise MalformedFile(f"chat template {name!r} in {place} must be a string; got {type(source).__name__}")
    return given


def continue_last(rendered: str, content: str) -> str:
    """Returns the rendered chat up to the end of its last message's content, without the template's ending. Templates
    may strip the content; if they drop or rewrite it, the chat cannot be continued.
    """
    stripped = content.strip()
    at = rendered.rfind(stripped)
    if not stripped or at < 0:
        raise InvalidRequest(
            "the last message cannot be continued: it is empty, or the chat template does not write its content as "
            "it is; send it without continue_final_message",
            param="continue_final_message",
        )
    kept = content.lstrip()
    return rendered[: at + len(kept if rendered.startswith(kept, at) else stripped)]
