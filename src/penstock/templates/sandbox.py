"""Limits the access, time and memory of chat templates in a Jinja environment.

Templates are programs that come with a model. Jinja's sandbox limits their access. This module also limits their time,
because nested loops could run for years, and the size of their texts, because a text that a loop doubles fills any
memory. It cannot cover every slow or large operation, so servers also render templates in a limited process
(process.py).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from functools import wraps
from time import thread_time
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from penstock.templates import CPU_SECONDS

MAX_TEXT = 2**22  # characters
MAX_ITEMS = 2**17  # per list
MAX_POWER = 2**10  # bits
WIDE = re.compile(r"%(\([^)]*\))?[^a-zA-Z%]*(\d{7}|\*)|\{[^{}]*\d{7}")  # formats with a very large width


SIZED = (str, list, tuple)
TICK, CONCATENATED = " tick", " concatenated"  # names that templates cannot spell


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and runs templates within limits."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._clock = threading.local()
        del self.globals["lipsum"]  # generates unlimited text
        for name in ("center", "indent", "wordwrap", "batch", "slice"):
            self.filters[name] = _with_small_numbers(self.filters[name])
        self.filters |= {TICK: self._tick, CONCATENATED: _concatenated}
        self.filters["format"] = _narrow_format(self.filters["format"])
        self.filters["join"] = _short_join(self.filters["join"])
        self.filters["replace"] = _short_replace(self.filters["replace"])

    def begin(self) -> None:
        """Starts the time limit of a rendering in this thread."""
        self._clock.ticks = 0
        self._clock.end = thread_time() + CPU_SECONDS

    @pass_context
    def _tick(self, *_: Any) -> None:
        """Runs in every loop iteration and macro call; raises SecurityError when time is up."""
        clock = self._clock
        clock.ticks += 1
        if clock.ticks % 16 == 0 and thread_time() > clock.end:
            raise SecurityError(f"it takes longer than {CPU_SECONDS:g} seconds, the limit")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Ticking().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _check_call(function, args, kwargs)
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatting = super().wrap_str_format(value)
        if formatting is not None:
            _check_format(value.__self__)
        return formatting


class _Ticking(NodeTransformer):
    """Adds a tick to loops and macros, and replaces ~ by a limited operation. Both become filters, which cost a fifth
    of other calls in a sandbox.
    """

    def visit_For(self, block: Any) -> Any:
        self.generic_visit(block)
        block.body.insert(0, nodes.ExprStmt(_filter(TICK, [nodes.Const(None)], block.lineno), lineno=block.lineno))
        return block

    visit_Macro = visit_CallBlock = visit_For

    def visit_Concat(self, concat: nodes.Concat) -> nodes.Filter:
        self.generic_visit(concat)
        return _filter(CONCATENATED, concat.nodes, concat.lineno)


def _filter(name: str, given: list[nodes.Expr], line: int) -> nodes.Filter:
    return nodes.Filter(given[0], name, given[1:], [], None, None, lineno=line)


def _concatenated(*parts: Any) -> str:
    texts = [str(part) for part in parts]
    _check_text(sum(map(len, texts)))
    return "".join(texts)


# ---- size checks ----


def _check_text(size: int) -> None:
    if size > MAX_TEXT:
        raise SecurityError(f"it makes a text of {size} characters; at most {MAX_TEXT} are allowed")


def _check_size(value: Any, size: int) -> None:
    """Raises SecurityError if a text or list made from the value would be too large."""
    if isinstance(value, str):
        _check_text(size)
    elif size > MAX_ITEMS:
        raise SecurityError(f"it makes a list of {size} items; at most {MAX_ITEMS} are allowed")


def _check_operation(operator: str, left: Any, right: Any) -> None:
    if operator == "+":
        if isinstance(left, SIZED) and isinstance(right, SIZED):
            _check_size(left, len(left) + len(right))
    elif operator == "*":
        if isinstance(left, int) and isinstance(right, SIZED):
            _check_size(right, left * len(right))
        elif isinstance(right, int) and isinstance(left, SIZED):
            _check_size(left, right * len(left))
        elif _number(left).bit_length() + _number(right).bit_length() > MAX_POWER:
            raise SecurityError("a product is too large a number")
    elif isinstance(left, str):
        _check_format(left)
    elif operator == "**" and _number(left).bit_length() * _number(right) > MAX_POWER:
        raise SecurityError(f"{left} ** {right} is too large a number")


def _check_call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _check_numbers((*args, *kwargs.values()))
    text = getattr(function, "__self__", None)
    if isinstance(text, str):
        match function.__name__, args:
            case "join", (items,):
                _check_text(_length_of_all(items) + len(text) * _length(items))
            case "replace", (str(old), str(new), *_):
                _check_text(_replaced(text, old, new))


def _check_numbers(given: Iterable[Any]) -> None:
    for number in given:
        if isinstance(number, int) and number > MAX_TEXT:
            raise SecurityError(f"{number} is too large a number here")


def _check_format(form: str) -> None:
    if WIDE.search(form):
        raise SecurityError("a format has a width that is too large")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (*SIZED, dict)) else 0


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _length_of_all(items: Any) -> int:
    return sum(map(_length, items)) if isinstance(items, list | tuple | dict) else 0


def _replaced(text: str, old: str, new: str) -> int:
    return len(text) + (text.count(old) * (len(new) - len(old)))


def _with_small_numbers(filter: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(filter)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_numbers((*args, *kwargs.values()))
        return filter(*args, **kwargs)

    return checked


def _narrow_format(format: Callable[..., str]) -> Callable[..., str]:
    @wraps(format)
    def checked(value: Any, *args: Any, **kwargs: Any) -> str:
        _check_format(str(value))
        return format(value, *args, **kwargs)

    return checked


def _short_join(join: Callable[..., str]) -> Callable[..., str]:
    @wraps(join)
    def checked(context: Any, value: Any, d: Any = "", attribute: Any = None) -> str:
        items = list(value)
        _check_text(_length_of_all(items) + _length(d) * len(items))
        return join(context, items, d, attribute)

    return checked


def _short_replace(replace: Callable[..., str]) -> Callable[..., str]:
    @wraps(replace)
    def checked(context: Any, s: Any, old: Any, new: Any, count: Any = None) -> str:
        _check_text(_replaced(str(s), str(old), str(new)))
        return replace(context, s, old, new, count)

    return checked
