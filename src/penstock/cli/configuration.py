"""Implements `penstock config`, which shows options and their sources."""

from __future__ import annotations

from typing import Annotated, Any

from penstock.cli.app import COMMANDS, command, nearest_commands
from penstock.cli.framework import options, settings
from penstock.cli.framework.command import Argument, Declared, Option, UsageError, declarations, read_setting
from penstock.cli.terminal import note, print_json, print_table

DEFAULT = "default"


def config(
    of: Annotated[
        list[str], Argument(metavar="COMMAND", help="The command whose options are shown, such as serve or keys add.")
    ] = ["serve"],  # noqa: B006 - it is never changed
    set_only: Annotated[bool, Option(name="--set", help="Show only options set by a variable or a file.")] = False,
    json: options.Json = False,
) -> None:
    """Show the options in force, and where each comes from.

      penstock config
      penstock config run --set
      PENSTOCK_PORT=9000 penstock config serve --json

    A flag takes precedence over a variable PENSTOCK_NAME, and the variable over penstock.toml: the file named by
    PENSTOCK_CONFIG, else the one in this folder, else penstock/penstock.toml in the user's configuration folder. In the
    file, a key before the first [table] applies to all commands with that option, and one below [serve] or [keys.add]
    to that command.
    """
    name = " ".join(of)
    if name not in COMMANDS:
        raise UsageError(f"there is no command {name!r}; {nearest_commands(name)}")
    loaded = settings.load()
    rows = [(each, _row(name, each, loaded)) for each in declarations(command(name)) if _is_option(each)]
    shown = [(each, row) for each, row in rows if not set_only or row["source"] != DEFAULT]
    if json:
        print_json({"command": name, "file": str(loaded.path or ""), "options": [row for _, row in shown]})
    else:
        _print(name, shown)
        note(f"file: {loaded.path or 'there is no penstock.toml'}")
    for variable in unknown_variables():
        note(f"the variable {variable} is not an option of any command")


def unknown_variables() -> list[str]:
    known = set()
    for option in (each for name in COMMANDS for each in declarations(command(name)) if _is_option(each)):
        assert isinstance(option.annotation, Option)
        known |= {settings.PREFIX + option.option_name.upper(), option.annotation.env}
    given = (name for name in settings.option_variables() if name.startswith(settings.PREFIX))
    return sorted(name for name in given if name.upper() not in known)


def _is_option(declared: Declared) -> bool:
    return isinstance(declared.annotation, Option)


def _row(name: str, declared: Declared, loaded: settings.Settings) -> dict[str, Any]:
    assert isinstance(declared.annotation, Option)
    setting = loaded.of(name, declared.option_name, declared.annotation.env)
    value = declared.default if setting is None else read_setting(declared, setting)
    source = DEFAULT if setting is None else setting.source
    return {"option": declared.option_name.replace("_", "-"), "value": value, "source": source}


def _print(name: str, rows: list[tuple[Declared, dict[str, Any]]]) -> None:
    from rich.table import Table

    if not rows:
        return note(f"nothing is set for penstock {name}: all options have their defaults")
    table = Table("option", "value", "from", box=None, pad_edge=False)
    for declared, row in rows:
        table.add_row(row["option"], _written(declared, row["value"]), row["source"])
    print_table(table)


def _written(declared: Declared, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "" if value is None else declared.written(value)
