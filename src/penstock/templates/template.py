"""Renders Jinja chat templates in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from penstock.errors import ContextTooLong, InvalidRequest
from penstock.templates import MAX_CHARACTERS
from penstock.templates.sandbox import BoundedEnvironment

MAX_INDENT = 64  # a larger JSON indentation could fill any memory


class Template:
    """Renders chats with one compiled template."""

    def __init__(self, source: str) -> None:
        self._environment = _environment()
        self._compiled = _compile(source, self._environment)

    def render(self, given: Mapping[str, Any]) -> str:
        """Renders a chat; raises InvalidRequest if the template fails."""
        self._environment.begin()
        try:
            return _joined(self._compiled.generate(given))
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the model's chat template refused the messages: {error}", param="messages") from None
        except InvalidRequest:
            raise
        except MemoryError:
            raise InvalidRequest(
                "the model's chat template needs more memory than it may have", param="messages"
            ) from None
        except Exception as error:  # a template may raise anything
            raise InvalidRequest(
                f"the model's chat template fails on these messages: {type(error).__name__}: {error}", param="messages"
            ) from None


def _compile(source: str, environment: BoundedEnvironment) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidRequest(
            f"the model's chat template is not valid Jinja, line {error.lineno}: {error.message}; "
            "plain prompts still work: use completions"
        ) from None
    except Exception as error:  # deep nesting overflows the stacks of Jinja and of Python's compiler
        raise InvalidRequest(f"the model's chat template cannot be compiled: {type(error).__name__}: {error}") from None


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment


class _GenerationBlock(Extension):
    """Renders the content of {% generation %} ... {% endgeneration %}, which marks assistant messages for training."""

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
    if indent is not None and indent > MAX_INDENT:
        raise jinja2.TemplateError(f"tojson can indent by at most {MAX_INDENT}; got {indent}")
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
