"""Commands from functions: a parameter's annotation says how it is written on the command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from inspect import Parameter, cleandoc, signature
from typing import Any, NamedTuple, get_args, get_type_hints

WIDTH = 100  # of a page of help


class WrongUsage(Exception):
    """What was asked for cannot be meant."""


class Leave(Exception):
    """The command is over, with this exit code."""

    def __init__(self, code: int) -> None:
        self.code = code


class Argument(NamedTuple):
    metavar: str
    help: str


class Option(NamedTuple):
    """`--its-name VALUE`; of a bool, `--its-name` alone; of a list, as often as there are values."""

    help: str
    name: str = ""  # where the parameter's own does not do
    least: float | None = None
    most: float | None = None
    env: str = ""  # the environment variable that gives the default


class Page(argparse.HelpFormatter):
    """A command's docstring: a line, examples that stay as they are, and remarks."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=WIDTH)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        summary, examples, *remarks = cleandoc(text).split("\n\n")
        lines = [f"  {line}" for line in cleandoc(examples).splitlines()]
        return "\n\n".join(
            [summary, "\n".join(lines), *(super(Page, self)._fill_text(part, width, indent) for part in remarks)]
        )


def parser_of(name: str, function: Callable[..., None]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        f"penstock {name}", description=function.__doc__, formatter_class=Page, add_help=False, allow_abbrev=False
    )
    arguments = parser.add_argument_group("Arguments")
    options = parser.add_argument_group("Options")
    usage = [f"penstock {name} [OPTIONS]"]
    for parameter, kind, given in parameters(function):
        if isinstance(given, Argument):
            usage.append(given.metavar if parameter.default is Parameter.empty else f"[{given.metavar}]")
            _add_argument(arguments, parameter, kind, given)
        else:
            _add_option(options, parameter, kind, given)
    options.add_argument("-h", "--help", action="help", help="Show this page and leave.")
    parser.usage = " ".join(usage)
    return parser


def parameters(function: Callable[..., None]) -> Iterator[tuple[Parameter, Any, Argument | Option]]:
    hints = get_type_hints(function, include_extras=True)
    for parameter in signature(function).parameters.values():
        yield parameter, *get_args(hints[parameter.name])


def flag(parameter: Parameter, given: Option) -> str:
    return given.name or f"--{parameter.name.replace('_', '-')}"


def _add_argument(group: argparse._ArgumentGroup, parameter: Parameter, kind: Any, given: Argument) -> None:
    optional = parameter.default is not Parameter.empty
    group.add_argument(
        parameter.name,
        metavar=given.metavar,
        nargs="?" if optional else "+" if kind == list[str] else None,
        default=parameter.default if optional else None,
        help=given.help + _shown(parameter.default),
    )


def _add_option(group: argparse._ArgumentGroup, parameter: Parameter, kind: Any, given: Option) -> None:
    if kind is bool:
        group.add_argument(flag(parameter, given), dest=parameter.name, action="store_true", help=given.help)
        return
    if kind == list[str] | None:
        name = flag(parameter, given)
        group.add_argument(name, dest=parameter.name, metavar="TEXT", action="append", help=given.help)
        return
    value = next((of for of in (int, float) if kind in (of, of | None)), str)
    group.add_argument(
        flag(parameter, given),
        dest=parameter.name,
        metavar={int: "NUMBER", float: "NUMBER", str: "TEXT"}[value],
        type=_within(value, given),
        default=os.environ.get(given.env, parameter.default),
        help=given.help + (f" [environment: {given.env}]" if given.env else _shown(parameter.default)),
    )


def _shown(default: Any) -> str:
    return "" if default in (None, "", Parameter.empty) else f" [default: {default}]"


def _within(value: type[int] | type[float] | type[str], given: Option) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            number: Any = value(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of the kind it takes") from None
        if given.least is not None and not number >= given.least:
            raise argparse.ArgumentTypeError(f"must be {given.least} or more; got {text}")
        if given.most is not None and not number <= given.most:
            raise argparse.ArgumentTypeError(f"must be {given.most} or less; got {text}")
        return number

    return read
