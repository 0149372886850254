"""Writes docs/penstock.1 from the declarations of commands; with --check, only says whether it is current."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from penstock.cli.app import COMMANDS, command
from penstock.cli.framework.command import Declared, Option, declarations

PAGE = Path(__file__).parents[1] / "docs" / "penstock.1"
FILES = {
    "penstock.toml": "Options, in this folder or in ~/.config/penstock; see penstock config.",
    "~/.cache/penstock": "Models and what was computed of them; see PENSTOCK_HOME.",
}
VARIABLES = {
    "PENSTOCK_HOME": "The folder for models.",
    "PENSTOCK_CONFIG": "The file of options.",
    "PENSTOCK_DEBUG": "With 1, errors are printed with a traceback.",
    "PENSTOCK_NAME": "The value of the option --name, for every option.",
}


def render() -> str:
    """Returns the page in the language of man."""
    return (
        "\n".join([*_head(), *_commands(), *_listed("FILES", FILES), *_listed("ENVIRONMENT", VARIABLES), *_codes()])
        + "\n"
    )


def _head() -> Iterator[str]:
    yield '.TH PENSTOCK 1 "" "" "Penstock"'
    yield from (".SH NAME", "penstock \\- one LLM inference engine for a laptop, a server and a fleet")
    yield from (".SH SYNOPSIS", ".B penstock", ".I COMMAND", "[OPTIONS] ...", ".SH COMMANDS")


def _commands() -> Iterator[str]:
    for name in COMMANDS:
        function = command(name)
        summary, _, rest = inspect.cleandoc(function.__doc__ or "").partition("\n\n")
        examples = inspect.cleandoc(rest.partition("\n\n")[0])
        yield from (
            f".SS penstock {escaped(name)}",
            escaped(summary),
            ".PP",
            ".nf",
            *map(escaped, examples.splitlines()),
            ".fi",
        )
        for declared in declarations(function):
            if not declared.of_engine:
                yield from (".TP", f".B {escaped(_spelled(declared))}", escaped(declared.annotation.help))


def _spelled(declared: Declared) -> str:
    if not isinstance(declared.annotation, Option) or declared.kind is bool:
        return declared.spelling
    value = "NUMBER" if declared.number_type else "TEXT"
    return f"{declared.spelling} {f'[{value}]' if declared.annotation.bare else value}"


def _listed(title: str, entries: dict[str, str]) -> Iterator[str]:
    yield f".SH {title}"
    for name, text in entries.items():
        yield from (".TP", f".B {escaped(name)}", escaped(text))


def _codes() -> Iterator[str]:
    yield from (".SH EXIT STATUS", "0 success, 1 an error, 2 wrong usage, 130 interrupted.")


def escaped(text: str) -> str:
    """Returns a line that says the same in the language of man."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def main() -> None:
    page = render()
    if sys.argv[1:] == ["--check"]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
            sys.exit(f"{PAGE} is not current: run python scripts/make_man_page.py")
    else:
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
