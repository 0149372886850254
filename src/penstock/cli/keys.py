"""Implements `penstock keys`, which adds, lists and removes API keys."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from penstock.cli.framework import options
from penstock.cli.framework.command import Argument, Option, OptionGroup, UsageError
from penstock.cli.terminal import note, print_json, print_table
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.keys import Key

KeyName = Annotated[str, Argument(metavar="NAME", help="Name of the key: up to 64 letters, digits and . _ @ + -")]
KeyFile = Annotated[
    str,
    Option(help="File of keys. Default: penstock/keys.json in the user's configuration folder.", env="PENSTOCK_KEYS"),
]
KeyModels = Annotated[
    list[str] | None, Option(name="--model", help="Model that the key may use. May be repeated. Default: all.")
]


class KeyShareOptions(NamedTuple):
    """Declares a key's share of a busy engine."""

    weight: Annotated[
        float, Option(minimum=0.001, maximum=1000, help="Share of a busy engine: twice the weight gets twice the work.")
    ] = 1.0
    priority: Annotated[
        int,
        Option(
            maximum=0,
            help="Lowest priority number that its requests may have; lower numbers are served first, regardless of "
            "shares.",
        ),
    ] = 0
    ttft_target: Annotated[
        int | None, Option(minimum=1, help="Target for the time to first token of its requests, in milliseconds.")
    ] = None
    itl_target: Annotated[
        int | None, Option(minimum=1, help="Target for the inter-token latency of its requests, in milliseconds.")
    ] = None

    def fields(self) -> dict[str, Any]:
        given = {"weight": self.weight, "priority": self.priority}
        targets = {"ttft_target_ms": self.ttft_target, "itl_target_ms": self.itl_target}
        defaults = {"weight": 1.0, "priority": 0}
        return {name: value for name, value in (given | targets).items() if value != defaults.get(name)}


def add(
    name: KeyName,
    expires: Annotated[str, Option(help="Expiry: 12h, 30d, or a date such as 2027-01-31 (UTC).")] = "",
    requests: Annotated[
        int | None, Option(minimum=1, help="Maximum requests per minute; GET requests do not count.")
    ] = None,
    tokens: Annotated[int | None, Option(minimum=1, help="Maximum tokens per minute, in prompts and answers.")] = None,
    concurrent: Annotated[int | None, Option(minimum=1, help="Maximum concurrent requests.")] = None,
    models: KeyModels = None,
    admin: Annotated[bool, Option(help="The key may also pull, create and delete models.")] = False,
    monitor: Annotated[bool, Option(help="The key may also read /metrics, which covers all keys and models.")] = False,
    file: KeyFile = "",
    json: options.Json = False,
    *,
    share: Annotated[KeyShareOptions, OptionGroup()],
) -> None:
    """Create an API key and print it. The file stores only its hash, so it cannot be shown again.

    penstock keys add alice
    penstock keys add ci --expires 30d --requests 60 --tokens 20000 --concurrent 4
    penstock keys add app --weight 3 --priority -1 --ttft-target 500
    penstock serve --keys ~/.config/penstock/keys.json

    A running server accepts the key at once.
    """
    from penstock.keys import NAME, Key, changing, digest, new_key, now

    if not re.match(NAME, name):
        raise UsageError(f"NAME takes up to 64 letters, digits and . _ @ + -; got {name!r}")
    secret, path = new_key(), _path(file)
    key = Key(
        name=name,
        sha256=digest(secret.encode()),
        created=now(),
        expires=_expiry(expires, now()) if expires else None,
        requests_per_minute=requests,
        tokens_per_minute=tokens,
        concurrent=concurrent,
        models=tuple(models or ()),
        admin=admin,
        monitor=monitor,
        **share.fields(),
    )
    with changing(path) as keys:
        if any(known.name == name for known in keys):
            raise ConfigError(f"{path} has a key {name!r} already: remove it first, or choose another name")
        keys.append(key)
    if json:
        print_json({"key": secret, "file": str(path)} | _fields(key))
        return
    note(f"added {name} to {path}. The key, which cannot be shown again:")
    print(secret)


def list_(file: KeyFile = "", json: options.Json = False) -> None:
    """List the names and limits of API keys. The keys themselves are not stored.

    penstock keys list
    penstock keys list --file ./keys.json --json
    """
    from penstock.keys import read

    keys = read(_path(file))
    if json:
        print_json([_fields(key) for key in keys])
        return
    from rich.table import Column, Table

    table = Table("name", "created", "expires", Column("limits", overflow="fold"), box=None, pad_edge=False)
    for key in keys:
        ends = "never" if key.expires is None else f"{key.expires:%Y-%m-%d %H:%M}" + " (expired)" * key.expired()
        table.add_row(key.name, f"{key.created:%Y-%m-%d}", ends, _limits(key))
    print_table(table)


def remove(name: KeyName, file: KeyFile = "") -> None:
    """Remove an API key. A running server refuses it from then on.

    penstock keys remove alice
    """
    from penstock.keys import changing

    path = _path(file)
    with changing(path) as keys:
        kept = [key for key in keys if key.name != name]
        if len(kept) == len(keys):
            raise ConfigError(f"{path} has no key {name!r}: see penstock keys list")
        keys[:] = kept
    note(f"removed {name} from {path}")


def _path(file: str) -> Path:
    if file:
        return Path(file).expanduser()
    settings = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(settings) / "penstock" / "keys.json"


def _expiry(text: str, now: datetime) -> datetime:
    if ahead := re.fullmatch(r"(\d{1,5})([hd])", text):
        return now + timedelta(hours=int(ahead[1]) * (24 if ahead[2] == "d" else 1))
    try:
        day = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"--expires takes 12h, 30d or a date such as 2027-01-31; got {text!r}") from None
    moment = day if day.tzinfo else day.replace(tzinfo=UTC)
    if moment <= now:
        raise UsageError(f"--expires {text} is in the past")
    return moment


def _fields(key: Key) -> dict[str, Any]:
    from msgspec import to_builtins

    fields: dict[str, Any] = to_builtins(key)
    del fields["sha256"]
    return fields


def _limits(key: Key) -> str:
    counts = {
        "requests per minute": key.requests_per_minute,
        "tokens per minute": key.tokens_per_minute,
        "concurrent requests": key.concurrent,
    }
    limits = [f"{limit} {what}" for what, limit in counts.items() if limit is not None]
    limits += [f"weight {key.weight:g}"] * (key.weight != 1) + [f"priority from {key.priority}"] * bool(key.priority)
    targets = {"TTFT": key.ttft_target_ms, "ITL": key.itl_target_ms}
    limits += [f"{what} target {target} ms" for what, target in targets.items() if target is not None]
    limits += [f"only {', '.join(key.models)}"] * bool(key.models)
    limits += ["may change models"] * key.admin + ["may read /metrics"] * key.monitor
    return ", ".join(limits)
