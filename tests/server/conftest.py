"""A server over loopback with a toy in place of a model: see toys.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from penstock.config import Config
from penstock.ipc.inprocess import InProcessClient
from penstock.ipc.spawn import ProcessClient
from penstock.server import Setup, Space, create_app
from penstock.server.access.guard import Rules
from penstock.server.access.protocol import BoundedProtocol
from penstock.server.app import bind
from tests.server import toys
from tests.server.browsing import MODEL, browsing, expect, visiting

NOTHING: Mapping[str, Any] = {}
WAIT = 120.0  # seconds after which something hangs: much longer than a busy machine takes


@dataclass
class Server:
    url: str
    client: Any
    requests: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=WAIT)
        self._sdk = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=WAIT)

    def sdk(self) -> openai.OpenAI:
        return self._sdk

    def async_sdk(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=WAIT)

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.http.post(path, json=fields)

    def get(self, path: str) -> httpx.Response:
        return self.http.get(path)

    def until(self, met: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT
        while not met():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.005)

    def until_idle(self) -> None:
        self.until(lambda: self.client.stats.running == self.client.stats.waiting == 0)


@contextmanager
def serving(
    client: Any,
    text: Any,
    name: str,
    path: Path | None = None,
    space: Space | None = None,
    pool: Mapping[str, Any] = NOTHING,
    **settings: Any,
) -> Iterator[Server]:
    """Serves a client's engine. `pool` are settings of the pool, the others those of the server."""
    lenient = settings.get("rules", Rules()).lenient
    models = toys.pool_of(client, text, name, path, lenient=lenient, **pool)
    with TemporaryDirectory() as folder:
        app = create_app(models, Setup(space=space or Space(Path(folder) / "data"), **settings))
        yield from _serving(client, app)


def _serving(client: Any, app: Any) -> Iterator[Server]:
    listener = bind("127.0.0.1", 0)
    config = uvicorn.Config(app, http=BoundedProtocol, log_config=None, timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    serving = Server(f"http://127.0.0.1:{listener.getsockname()[1]}", client)
    try:
        serving.until(lambda: server.started or not thread.is_alive())
        assert server.started
        yield serving
    finally:
        server.should_exit = True
        thread.join(WAIT)


@pytest.fixture(scope="session")
def serve() -> Callable[[Any, Any, str], AbstractContextManager[Server]]:
    return serving


@pytest.fixture(scope="session")
def toy_text() -> toys.ToyText:
    return toys.ToyText()


@pytest.fixture(scope="module")
def parrot() -> Iterator[Server]:
    """Served as "toy/parrot" from a thread, as fast as it can."""
    with serving(InProcessClient(toys.open_parrot, "parrot"), toys.ToyText(), "toy/parrot") as server:
        yield server


@pytest.fixture(scope="module")
def strict_parrot() -> Iterator[Server]:
    """Refuses what others ignore and list."""
    client = InProcessClient(toys.open_parrot, "parrot")
    with serving(client, toys.ToyText(), "toy/parrot", rules=Rules(lenient=False)) as server:
        yield server


@pytest.fixture(scope="module")
def watched_parrot() -> Iterator[Server]:
    """Serves the parrot leniently and keeps the requests that its engine got in `requests`."""
    client = InProcessClient(toys.open_parrot, "parrot")
    run, requests = client.run, []

    def keep(request: Any, read: Any) -> Any:
        requests.append(request)
        return run(request, read)

    client.run = keep  # type: ignore[method-assign]
    with serving(client, toys.ToyText(), "toy/parrot", rules=Rules(lenient=True)) as server:
        server.requests = requests
        yield server


@pytest.fixture(scope="module")
def slow_parrot() -> Iterator[Server]:
    with serving(InProcessClient(toys.open_slow_parrot, "parrot"), toys.ToyText(), "toy/parrot") as server:
        yield server


@pytest.fixture
def parrot_process() -> Iterator[Server]:
    """The engine in a process of its own."""
    with serving(
        ProcessClient(Config(model="parrot", post_mortem="off"), toys.HOST), toys.ToyText(), "toy/parrot"
    ) as server:
        yield server


@pytest.fixture
def mortal_parrot() -> Iterator[Server]:
    """The same, but not restarted when it dies."""
    with serving(
        ProcessClient(Config(model="parrot", post_mortem="off"), toys.HOST, ()), toys.ToyText(), "toy/parrot"
    ) as server:
        yield server


@pytest.fixture(scope="module")
def toy() -> Iterator[Server]:
    """Serves a parrot that calls tools, for the page."""
    client = InProcessClient(lambda: toys.open_paced_parrot(0.001), "parrot")
    with serving(client, toys.Hermes(), MODEL) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as browser:
        yield browser


@pytest.fixture
def page(browser: Any, toy: Server) -> Iterator[Any]:
    """Is the page in a browser, once it knows the model."""
    with visiting(browser, toy.url) as page:
        expect(page.locator("#model")).to_have_value(MODEL)
        yield page
