"""A model's chat template: messages to the prompt text it was trained on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.errors import ContextTooLong, InvalidRequest, MalformedFile
from penstock.text.folder import read_json
from penstock.text.tokenizer import MAX_CHARACTERS

Message = Mapping[str, Any]


class ChatTemplate:
    """`sources` are templates by name: "default", and "tool_use" where a model has one apart for tools. `tokens` are
    the special tokens a template may name: bos_token, eos_token and so on."""

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, str]) -> None:
        self._sources = sources
        self._tokens = tokens
        self._compiled: dict[str, jinja2.Template] = {}

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        given = {"documents": None, **self._tokens, **kwargs}
        given |= {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": tools or None}
        template = self._template("tool_use" if tools and "tool_use" in self._sources else "default")
        try:
            return _joined(template.generate(given))
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the model's chat template says: {error}", param="messages") from None
        except InvalidRequest:
            raise
        except Exception as error:  # the template is the model's own program: it may raise anything
            raise InvalidRequest(
                f"the model's chat template fails on these messages: {type(error).__name__}: {error}", param="messages"
            ) from None

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._sources:
            raise InvalidRequest(f"the model has no default chat template, only {', '.join(self._sources)}")
        if name not in self._compiled:
            self._compiled[name] = _compile(self._sources[name])
        return self._compiled[name]


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


def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidRequest(
            f"the model's chat template is not valid Jinja, line {error.lineno}: {error.message}; "
            "the model still takes plain prompts: use completions"
        ) from None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment


class _GenerationBlock(Extension):
    """{% generation %} ... {% endgeneration %} marks what an assistant said, for training: here it is its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _joined(pieces: Iterable[str]) -> str:
    rendered = []
    room = MAX_CHARACTERS
    for piece in pieces:
        room -= len(piece)
        if room < 0:
            raise ContextTooLong(f"the rendered chat is longer than {MAX_CHARACTERS} characters", param="messages")
        rendered.append(piece)
    return "".join(rendered)
