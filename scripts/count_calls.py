"""Counts the functions of Penstock that a streamed chat calls between its HTTP request's bytes and the engine.

Each function counts once. The second request is counted, when all modules are loaded. --list names the functions in the
order of their first calls.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType

import uvicorn

import penstock
from penstock.ipc.inprocess import InProcessClient
from penstock.server import Setup, Space, create_app
from penstock.server.access.protocol import BoundedProtocol
from penstock.server.app import bind

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.server import toys

ROOT = str(Path(penstock.__file__).parent)
SEND = "ipc/inprocess_engine.py", "send"  # hands the request to the engine's thread
BODY = {"model": "toy", "stream": True, "max_tokens": 2, "messages": [{"role": "user", "content": "[hello]"}]}
GENERATED = {"<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>"}


class Counter:
    """Notes each function of ours at its first call, until the request reaches the engine."""

    def __init__(self) -> None:
        self.found: dict[CodeType, None] = {}
        self.done = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if self.done or event != "call" or not code.co_filename.startswith(ROOT) or code.co_name in GENERATED:
            return
        self.found.setdefault(code)
        self.done = (place(code), code.co_name) == SEND


def place(code: CodeType) -> str:
    return code.co_filename.removeprefix(ROOT + "/")


async def ask(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(BODY).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    answer = await reader.read()
    assert b"[DONE]" in answer, answer.decode()
    writer.close()


async def measure(folder: Path) -> Counter:
    pool = toys.pool_of(InProcessClient(toys.open_parrot, "toy"), toys.ToyText(), "toy")
    listener = bind("127.0.0.1", 0)
    listener.listen()
    config = uvicorn.Config(create_app(pool, Setup(space=Space(folder))), http=BoundedProtocol, log_config=None)
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve([listener]))
    port = listener.getsockname()[1]
    while not server.started:
        await asyncio.sleep(0.01)
    await ask(port)
    counter = Counter()
    sys.setprofile(counter)
    await ask(port)
    sys.setprofile(None)
    server.should_exit = True
    await running
    return counter


def main() -> None:
    with TemporaryDirectory() as folder:
        counter = asyncio.run(measure(Path(folder)))
    files = {place(code) for code in counter.found}
    if "--list" in sys.argv:
        for code in counter.found:
            print(f"{place(code)}:{code.co_firstlineno} {code.co_qualname}")
    print(f"{len(counter.found)} functions in {len(files)} files{'' if counter.done else ', engine not reached'}")


if __name__ == "__main__":
    main()
