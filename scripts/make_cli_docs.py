"""Writes docs/cli.md from the commands themselves; with --check, only says whether it is current."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import typer

from penstock.cli import app

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
HEAD = """\
# The command line

Written by `scripts/make_cli_docs.py` from what `--help` says; do not edit.

Answers go to stdout, everything else to stderr. Exit codes: 0 done, 1 an error, 2 wrong usage, 130 interrupted.
`PENSTOCK_HOME` is where models are kept (by default `penstock` in the user's cache folder); `PENSTOCK_DEBUG=1` shows
where an error comes from.
"""


def render() -> str:
    group: Any = typer.main.get_command(app)
    return "\n".join([HEAD, *(_section(name, command) for name, command in group.commands.items())])


def _section(name: str, command: Any) -> str:
    summary, _, rest = inspect.cleandoc(command.help).partition("\n\n")
    examples, _, remarks = rest.removeprefix("\b\n").partition("\n\n")
    parts = [f"## {name}", summary, f"```sh\n{inspect.cleandoc(examples)}\n```"]
    if remarks:
        parts.append(remarks)
    rows = [_row(param) for param in command.params if param.name != "help"]
    parts.append("| | default | |\n|---|---|---|\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _row(param: Any) -> str:
    named = (
        ", ".join(f"`{option}`" for option in param.opts) if param.param_type_name == "option" else f"`{param.metavar}`"
    )
    silent = param.required or param.default is None or param.default is False or param.default == ""
    default = "" if silent else f"`{param.default}`"
    return f"| {named} | {default} | {param.help or ''} |"


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
