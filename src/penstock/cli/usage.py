"""Implements `penstock usage`, which shows tokens used by API keys, and their cost."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from penstock.cli.framework import options
from penstock.cli.framework.command import Option, UsageError
from penstock.cli.terminal import print_json, print_table

if TYPE_CHECKING:
    from penstock.server.access.usage import KeyUsage, UsageRecord

OFF = "off"


class UsageOptions(NamedTuple):
    usage: Annotated[
        str,
        Option(
            help="File that records tokens and cost by API key, model and day (see penstock usage). Default: "
            "usage.sqlite in PENSTOCK_HOME. off: nothing is recorded."
        ),
    ] = ""
    price: Annotated[
        list[str] | None,
        Option(
            help="Price of a model's tokens, such as 'smollm2=0.1,0.4': MODEL=IN,OUT or MODEL=IN,OUT,CACHED, per "
            "million tokens. May be repeated."
        ),
    ] = None

    def record(self) -> UsageRecord | None:
        from penstock.server.access.usage import UsageRecord, parse_price

        prices = dict(parse_price(each) for each in self.price or ())
        if self.usage == OFF:
            if prices:
                raise UsageError("--price needs a record of usage: leave out --usage off")
            return None
        return UsageRecord(_path(self.usage), prices)


def usage(
    key: Annotated[str | None, Option(help="Only this key. '': requests without a key.")] = None,
    since: Annotated[str, Option(help="Only since this day: 7d, or a date such as 2027-01-31 (UTC).")] = "",
    days: Annotated[bool, Option(help="List each day instead of the total.")] = False,
    file: Annotated[str, Option(help="File of the record. Default: usage.sqlite in PENSTOCK_HOME.")] = "",
    json: options.Json = False,
) -> None:
    """Show the tokens that API keys have used, by model, and their cost.

    penstock usage
    penstock usage --key alice --since 30d --json
    penstock usage --since 2027-01-01 --days

    Servers write the record every 2 seconds. Costs use the prices that a server was started with (--price).
    """
    from penstock.server.access.usage import by_key_and_model, read_usage

    rows = read_usage(_path(file), key, _day(since) if since else None)
    shown = rows if days else by_key_and_model(rows)
    if json:
        print_json({"usage": [_fields(row) for row in shown]})
    else:
        _print(shown, days)


def _path(file: str) -> Path:
    from penstock.store import home

    return Path(file).expanduser() if file else home() / "usage.sqlite"


def _day(text: str) -> date:
    if ago := re.fullmatch(r"(\d{1,5})d", text):
        return datetime.now(UTC).date() - timedelta(days=int(ago[1]))
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise UsageError(f"--since takes 7d or a date such as 2027-01-31; got {text!r}") from None


def _fields(row: KeyUsage) -> dict[str, Any]:
    fields: dict[str, Any] = {"day": row.day} if row.day else {}
    fields |= {"key": row.key, "model": row.model, "requests": row.requests, "prompt_tokens": row.prompt}
    fields |= {"cached_tokens": row.cached, "generated_tokens": row.generated, "cost": round(row.cost, 6)}
    return fields


def _print(rows: list[KeyUsage], days: bool) -> None:
    from rich.table import Column, Table

    numbers = [Column(name, justify="right") for name in ("requests", "prompt", "cached", "generated", "cost")]
    table = Table(*(["day"] if days else []), "key", "model", *numbers, box=None, pad_edge=False)
    for row in rows:
        counts = (f"{count:,}" for count in row[2:6])
        table.add_row(*([row.day] if days else []), row.key or "-", row.model, *counts, f"{row.cost:,.4f}")
    print_table(table)
