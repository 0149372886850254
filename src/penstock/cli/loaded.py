"""Implements `penstock ps`, `load` and `stop`, which show and change the models that a running server has loaded."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

from penstock.cli.framework import options
from penstock.cli.framework.command import Argument, Option
from penstock.cli.terminal import note, print_json, print_table, readable_size

if TYPE_CHECKING:
    from urllib.error import HTTPError

URL = "PENSTOCK_URL"  # environment variable with the server's address
KEY = "PENSTOCK_API_KEY"
WAITING_SECONDS = 600.0  # a large model takes minutes to load

ServerUrl = Annotated[str, Option(help="Address of the server.", env=URL)]
ServedName = Annotated[str, Argument(metavar="MODEL", help="A model that the server serves.")]
DEFAULT_URL = "http://127.0.0.1:8000"


def ps(json: options.Json = False, *, url: ServerUrl = DEFAULT_URL) -> None:
    """List the models of a running server, and what each is doing.

    penstock ps
    penstock ps --json
    """
    from rich.table import Table

    from penstock.errors import EngineUnavailable

    models = ask(url, "/health").get("models")
    if models is None:
        raise EngineUnavailable(f"the server at {url} needs an API key: put it into {KEY}")
    if json:
        print_json(models)
        return
    table = Table("name", "state", "memory", "process", box=None, pad_edge=False)
    for model in models:
        size = readable_size(model["bytes"]) if model["bytes"] > 1 else ""
        table.add_row(model["name"], model["state"], size, str(model["pid"] or ""))
    print_table(table)


def load(model: ServedName, *, url: ServerUrl = DEFAULT_URL) -> None:
    """Load a model of a running server now, so that its first request does not wait.

    penstock load smollm2
    """
    ask(url, "/models/load", {"model": model})
    note(f"{model} is loaded")


def stop(model: ServedName, *, url: ServerUrl = DEFAULT_URL) -> None:
    """Unload a model of a running server, once its answers have ended. The next request loads it again.

    penstock stop smollm2
    """
    ask(url, "/models/unload", {"model": model})
    note(f"{model} is unloaded")


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Returns the server's answer; raises its error."""
    import json
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    from penstock.errors import EngineUnavailable

    headers = {"content-type": "application/json"}
    if key := os.environ.get(KEY):
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        request = Request(url.rstrip("/") + path, data, headers)
        with urlopen(request, timeout=WAITING_SECONDS) as answer:
            return json.load(answer)
    except HTTPError as error:
        raise EngineUnavailable(f"the server at {url} refused: {_reason(error)}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        told = getattr(reason, "strerror", None) or reason
        raise EngineUnavailable(
            f"no server answers at {url} ({told}): start one with `penstock serve`, or name another with --url"
        ) from error


def _reason(error: HTTPError) -> str:
    import json

    try:
        told = json.load(error)["error"]
        return str(told["message"] if isinstance(told, dict) else told)
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code}"
