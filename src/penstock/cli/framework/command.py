"""Builds a command's argument parser from its function: each parameter's annotation defines its argument or option."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from inspect import Parameter, cleandoc, signature
from typing import Any, NamedTuple, get_args, get_type_hints

from penstock.backend.devices import option_help
from penstock.cli.framework.settings import Setting, Settings
from penstock.config import DEFAULTS, OPTIONS
from penstock.config.values import EXAMPLES, read_bytes, written_bytes
from penstock.errors import ConfigError

WIDTH = 100  # largest width of help lines
REQUIRED = Parameter.empty


class UsageError(Exception):
    """Reports an invalid command line; the command ends with exit code 2."""


class Exit(Exception):
    """Ends the command with an exit code, without a message."""

    def __init__(self, code: int) -> None:
        self.code = code


class Argument(NamedTuple):
    """Marks a parameter as a positional argument."""

    metavar: str
    help: str


class Rest(NamedTuple):
    """Annotates a list that takes every word after `--` unchanged."""

    metavar: str
    help: str


class Option(NamedTuple):
    """Annotates an option `--its-name VALUE`. A bool is a flag without a value; a list is repeated for each value."""

    help: str
    name: str = ""  # the flag, if not derived from the parameter
    minimum: float | None = None
    maximum: float | None = None
    env: str = ""  # environment variable of the default
    short: str = ""  # single-letter flag
    bare: str = ""  # value of a flag without one; empty: the value is required
    in_bytes: bool = False  # a number of bytes, optionally with a unit


class EngineOptions(NamedTuple):
    """Annotates a parameter that takes these engine options (`penstock.config.OPTIONS`), each with its own flag. Their
    values form one dictionary, for `configure`.
    """

    names: tuple[str, ...]


class OptionGroup(NamedTuple):
    """Annotates a parameter whose type is a named tuple of options. Each field has its own flag or is again a group;
    their values form one tuple.
    """


class Declared(NamedTuple):
    """Declares an argument or an option of a command."""

    name: str
    kind: Any  # type
    default: Any  # REQUIRED: none
    annotation: Argument | Option | Rest
    of_engine: bool = False

    @property
    def spelling(self) -> str:
        if isinstance(self.annotation, Rest):
            return f"-- {self.annotation.metavar}"
        if isinstance(self.annotation, Argument):
            return self.annotation.metavar
        return self.annotation.name or f"--{self.name.replace('_', '-')}"

    @property
    def option_name(self) -> str:
        """Returns the flag as in variables and files: without leading dashes, and with _."""
        return self.spelling.removeprefix("--").replace("-", "_")

    def written(self, value: Any) -> str:
        in_bytes = isinstance(self.annotation, Option) and self.annotation.in_bytes
        return written_bytes(value) if in_bytes else str(value)

    @property
    def is_list(self) -> bool:
        return self.kind in (list[str] | None, tuple)

    @property
    def number_type(self) -> type[int] | type[float] | None:
        """Returns the type of a numeric value; None for text."""
        return next((number for number in (int, float) if self.kind in (number, number | None)), None)


def help_width() -> int:
    try:
        return min(WIDTH, os.get_terminal_size(sys.stdout.fileno()).columns or WIDTH)
    except (OSError, ValueError):  # a pipe or a file
        return WIDTH


class HelpFormatter(argparse.HelpFormatter):
    """Prints a command's docstring: a summary, examples with their line breaks, and remarks."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=help_width())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        summary, examples, *remarks = cleandoc(text).split("\n\n")
        lines = [f"  {line}" for line in cleandoc(examples).splitlines()]
        summary, *filled = (super(HelpFormatter, self)._fill_text(each, width, indent) for each in (summary, *remarks))
        return "\n\n".join([summary, "\n".join(lines), *filled])


def make_parser(name: str, function: Callable[..., None]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        f"penstock {name}",
        description=function.__doc__,
        formatter_class=HelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    arguments = parser.add_argument_group("Arguments")
    options = parser.add_argument_group("Options")
    engine_options = parser.add_argument_group("Engine options")
    usage = [f"penstock {name} [OPTIONS]"]
    for declared in declarations(function):
        if isinstance(declared.annotation, Argument):
            usage.append(declared.spelling if declared.default is REQUIRED else f"[{declared.spelling}]")
            _add_argument(arguments, declared, declared.annotation)
        elif isinstance(declared.annotation, Rest):
            usage.append(f"[{declared.spelling}]")
        else:
            _add_option(engine_options if declared.of_engine else options, declared, declared.annotation)
    options.add_argument("-h", "--help", action="help", help="Show this page and exit.")
    parser.usage = " ".join(usage)
    return parser


def declarations(function: Callable[..., None]) -> Iterator[Declared]:
    for parameter, kind, annotation in _parameters(function):
        if isinstance(annotation, OptionGroup):
            yield from _grouped(kind)
        elif isinstance(annotation, EngineOptions):
            yield from engine_options(annotation)
        else:
            yield Declared(parameter.name, kind, parameter.default, annotation)


def _grouped(group: Any) -> Iterator[Declared]:
    for name, hint in get_type_hints(group, include_extras=True).items():
        kind, annotation = get_args(hint)
        if isinstance(annotation, OptionGroup):
            yield from _grouped(kind)
        else:
            yield Declared(name, kind, group._field_defaults[name], annotation)


def engine_options(annotation: EngineOptions) -> Iterator[Declared]:
    for name in annotation.names:
        engine, default = OPTIONS[name], DEFAULTS[name]
        option = Option(
            option_help(name, engine), minimum=engine.minimum, maximum=engine.maximum, in_bytes=engine.in_bytes
        )
        yield Declared(name, type(default), default, option, of_engine=True)


def split_rest(function: Callable[..., None], words: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Separates the words to parse from the words after `--`, keyed by the parameter that takes them."""
    names = [parameter.name for parameter, _, annotation in _parameters(function) if isinstance(annotation, Rest)]
    if not names:
        return list(words), {}
    end = words.index("--") if "--" in words else len(words)
    return list(words[:end]), {names[0]: list(words[end + 1 :])}


def call(function: Callable[..., None], values: dict[str, Any]) -> None:
    """Calls a command with parsed values by name. Engine options are gathered in a dictionary, a group in its tuple."""
    values = dict(values)
    for parameter, kind, annotation in _parameters(function):
        if isinstance(annotation, EngineOptions):
            values[parameter.name] = {name: values.pop(name) for name in annotation.names}
        elif isinstance(annotation, OptionGroup):
            values[parameter.name] = _gather(kind, values)
    function(**values)


def _gather(group: Any, values: dict[str, Any]) -> Any:
    hints = get_type_hints(group, include_extras=True)
    nested = {name: get_args(hint)[0] for name, hint in hints.items() if isinstance(get_args(hint)[1], OptionGroup)}
    fields = {name: _gather(nested[name], values) if name in nested else values.pop(name) for name in group._fields}
    return group(**fields)


def _parameters(function: Callable[..., None]) -> Iterator[tuple[Parameter, Any, Any]]:
    hints = get_type_hints(function, include_extras=True)
    for parameter in signature(function).parameters.values():
        yield parameter, *get_args(hints[parameter.name])


SWITCHES = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
NUMBERS = {(False, True): "?", (True, True): "*", (True, False): "+"}  # keys: (is a list, is optional)


def _add_argument(group: argparse._ArgumentGroup, declared: Declared, argument: Argument) -> None:
    optional = declared.default is not REQUIRED
    group.add_argument(
        declared.name,
        metavar=argument.metavar,
        nargs=NUMBERS.get((declared.kind == list[str], optional)),
        default=declared.default if optional else None,
        help=argument.help + _default_text(declared),
    )


def _add_option(group: argparse._ArgumentGroup, declared: Declared, option: Option) -> None:
    flag, dest, kind = declared.spelling, declared.name, declared.kind
    unset = argparse.SUPPRESS
    if kind is bool:
        group.add_argument(flag, dest=dest, action="store_true", default=unset, help=option.help)
        off = f"--no-{flag.removeprefix('--')}"
        group.add_argument(off, dest=dest, action="store_false", default=unset, help=argparse.SUPPRESS)
        return
    if declared.is_list:
        group.add_argument(flag, dest=dest, metavar="TEXT", action="append", default=unset, help=option.help)
        return
    number_type = declared.number_type
    group.add_argument(
        *([option.short] if option.short else []),
        flag,
        dest=dest,
        metavar="BYTES" if option.in_bytes else "NUMBER" if number_type else "TEXT",
        nargs="?" if option.bare else None,
        const=option.bare or None,
        type=_reader(number_type, option) if number_type else str,
        default=unset,
        help=option.help + (f" [environment: {option.env}]" if option.env else _default_text(declared)),
    )


def complete(name: str, function: Callable[..., None], given: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Returns the values of all options: from the command line, else from settings, else the defaults."""
    values = dict(given)
    for declared in declarations(function):
        if isinstance(declared.annotation, Option) and declared.name not in values:
            setting = settings.of(name, declared.option_name, declared.annotation.env)
            values[declared.name] = declared.default if setting is None else read_setting(declared, setting)
    return values


def read_setting(declared: Declared, setting: Setting) -> Any:
    """Parses a setting's value; raises ConfigError if it is invalid."""
    value, option = setting.value, declared.annotation
    assert isinstance(option, Option)
    what = f"{setting.source} sets {declared.option_name.replace('_', '-')}"
    if declared.kind is bool:
        read = value if isinstance(value, bool) else SWITCHES.get(str(value).lower())
        if read is None:
            raise ConfigError(f"{what} to {value!r}: it is true or false")
        return read
    if declared.is_list:
        texts = value if isinstance(value, list) else str(value).split(",")
        return [str(text) for text in texts]
    if declared.number_type is None:
        return str(value)
    try:
        return _reader(declared.number_type, option)(str(value))
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{what}: it {error}") from None


def _default_text(declared: Declared) -> str:
    return "" if declared.default in (None, "", REQUIRED) else f" [default: {declared.written(declared.default)}]"


def _reader(number_type: type[int] | type[float], option: Option) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            number = read_bytes(text) if option.in_bytes else number_type(text)
        except ValueError:
            what = "a whole number" if number_type is int else "a number"
            what = f"a number of bytes, such as {EXAMPLES}" if option.in_bytes else what
            raise argparse.ArgumentTypeError(f"takes {what}; got {text!r}") from None
        if option.minimum is not None and not number >= option.minimum:
            raise argparse.ArgumentTypeError(f"must be {option.minimum} or more; got {text}")
        if option.maximum is not None and not number <= option.maximum:
            raise argparse.ArgumentTypeError(f"must be {option.maximum} or less; got {text}")
        return number

    return read
