"""`penstock trace` records the steps and requests of a running server for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from penstock.cli.framework.command import Option
from penstock.cli.loaded import DEFAULT_URL, ServerUrl, ask
from penstock.cli.terminal import note

POLL_SECONDS = 0.5  # a view keeps 240 steps


def trace(
    seconds: Annotated[float, Option(minimum=0.0, help="Seconds to record; 0: only what the server remembers.")] = 0.0,
    output: Annotated[str, Option(help="File to write.")] = "trace.json",
    *,
    url: ServerUrl = DEFAULT_URL,
) -> None:
    """Record the steps and requests of a running server, to be opened in https://ui.perfetto.dev.

    penstock trace
    penstock trace --seconds 10 --output slow.json
    """
    import json
    from time import monotonic, sleep

    from penstock.tools.step_trace import StepTrace

    recorded, end = StepTrace(), monotonic() + seconds
    recorded.add(ask(url, "/engine"))
    while (rest := end - monotonic()) > 0:
        sleep(min(rest, POLL_SECONDS))
        recorded.add(ask(url, "/engine"))
    made = recorded.to_json()
    Path(output).write_text(json.dumps(made))
    kinds = [event["ph"] for event in made["traceEvents"]]
    note(f"{output} has {kinds.count('X')} steps; open it in https://ui.perfetto.dev")
