"""Implements `penstock replay`, which repeats an engine's work before its death."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from penstock.cli.framework.command import Argument, Exit, Option

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.types import Request


def replay(
    bundle: Annotated[str, Argument(metavar="BUNDLE", help="File that the server named when its engine died.")],
    seconds: Annotated[int, Option(minimum=1, help="Seconds after which the requests are ended.")] = 60,
) -> None:
    """Repeat an engine's work before its death.

      penstock replay ~/.cache/penstock/post-mortem/20261116-101500-1.json

    The engine gets the bundle's config and requests. A bundle has the requests' lengths with made-up tokens, unless the
    server ran with --post-mortem tokens. The exit code is 1 if the engine dies again.
    """
    import asyncio

    import msgspec

    from penstock.errors import InvalidRequest
    from penstock.ipc import post_mortem

    try:
        found = post_mortem.read(Path(bundle))
    except (OSError, msgspec.ValidationError, msgspec.DecodeError) as error:
        raise InvalidRequest(f"{bundle} is not a file that describes an engine's death: {error}") from error
    config, requests = post_mortem.to_replay(found)
    print(f"{found.when}: {found.reason}")
    print(f"{len(requests)} requests, {sum(each.suspect for each in found.requests)} of them in doubt")
    ending = asyncio.run(_run(config, requests, seconds))
    print(ending or "the engine survived all requests")
    if ending:
        raise Exit(1)


async def _run(config: Config, requests: list[Request], seconds: int) -> str:
    import asyncio

    from penstock.ipc.client import EngineState
    from penstock.ipc.spawn import ProcessClient

    client = ProcessClient(config, pauses=())
    await client.start()

    async def follow(request: Request) -> None:
        async for _ in client.submit(request):
            pass

    asking = [asyncio.create_task(follow(request)) for request in requests]
    try:
        if asking:
            await asyncio.wait(asking, timeout=seconds)
        return client.unavailable_reason if client.state is EngineState.FAILED else ""
    finally:
        for task in asking:
            task.cancel()
        await client.close()
