"""Writes docs/cli.md from the commands themselves; with --check, only says whether it is current."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path

from penstock.cli.app import COMMANDS, command
from penstock.cli.command import Argument, Option, flag, parameters

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
HEAD = """\
# The command line

Written by `scripts/make_cli_docs.py` from what `--help` says; do not edit.

Answers go to stdout, everything else to stderr. Exit codes: 0 done, 1 an error, 2 wrong usage, 130 interrupted.
`PENSTOCK_HOME` is where models are kept (by default `penstock` in the user's cache folder); `PENSTOCK_DEBUG=1` shows
where an error comes from.
"""


def render() -> str:
    return "\n".join([HEAD, *(_section(name, command(name)) for name in COMMANDS)])


def _section(name: str, function: Callable[..., None]) -> str:
    summary, _, rest = inspect.cleandoc(function.__doc__ or "").partition("\n\n")
    examples, _, remarks = rest.partition("\n\n")
    parts = [f"## {name}", summary, f"```sh\n{inspect.cleandoc(examples)}\n```"]
    if remarks:
        parts.append(remarks)
    rows = [_row(parameter, given) for parameter, _, given in parameters(function)]
    parts.append("| | default | |\n|---|---|---|\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _row(parameter: inspect.Parameter, given: Argument | Option) -> str:
    named = given.metavar if isinstance(given, Argument) else flag(parameter, given)
    silent = any(parameter.default is nothing for nothing in (inspect.Parameter.empty, None, False, ""))
    default = "" if silent else f"`{parameter.default}`"
    return f"| `{named}` | {default} | {given.help} |"


def main() -> None:
    page = render()
    if sys.argv[1:] == ["--check"]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
            sys.exit(f"{PAGE} is not current: run python scripts/make_cli_docs.py")
    else:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
