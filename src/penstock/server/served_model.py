"""What a server serves: an engine, the text side of its model, and the name clients know it by."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import NamedTuple, TypeVar

from penstock.errors import EngineUnavailable, InvalidRequest, ModelNotFound, Overloaded
from penstock.ipc.client import EngineClient
from penstock.server.request_context import notes
from penstock.server.telemetry.metrics import Metrics
from penstock.text import Text, check_answers, make_request
from penstock.types import Limits, Request, SamplingParams

T = TypeVar("T")

WAITING = 16  # requests that may wait for each one computed, unless another number is asked for
OFF_LOOP = 4096  # characters: encoding more than this would hold up every other stream


class InFlight:
    """The answers under way."""

    def __init__(self, waiting: int | None = None) -> None:
        self.waiting = waiting  # of them beyond those computed at once; None: in proportion to those
        self.taken = 0


class ServedModel(NamedTuple):
    client: EngineClient
    text: Text
    name: str
    created: int  # seconds since 1970
    metrics: Metrics
    path: Path | None = None  # of the model's files, where they are known
    line: InFlight | None = None  # none: it has no end
    lenient: bool = False  # fields that are not known are ignored, and listed in the answer

    @property
    def limits(self) -> Limits:
        if self.client.hello is None:
            raise EngineUnavailable(self.client.trouble)
        return self.client.hello.limits

    @property
    def encoder(self) -> bool:
        """Whether embeddings are all that the model makes, as far as is known."""
        return self.client.hello is not None and self.client.hello.limits.encoder

    @property
    def places(self) -> float:
        """How many requests may be here, computed and waiting; without an engine all are answered at once."""
        if self.line is None or self.client.hello is None:
            return inf
        rows = self.client.hello.limits.max_rows
        return rows + (WAITING * rows if self.line.waiting is None else self.line.waiting)

    @contextmanager
    def place(self) -> Iterator[None]:
        """For one answer; refuses it where there is none."""
        line = self.line or InFlight()
        if line.taken >= self.places:
            raise Overloaded(f"{line.taken} answers are under way, as many as may be: try again soon")
        line.taken += 1
        try:
            yield
        finally:
            line.taken -= 1

    def check_model(self, name: str) -> None:
        if name != self.name:
            raise ModelNotFound(f"the model {name!r} does not exist here; this server serves {self.name!r}")

    def check_answers(self) -> None:
        check_answers(self.limits)

    def check_ids(self, ids: Collection[int], param: str) -> None:
        vocab = min(self.limits.vocab, self.text.tokenizer.vocab_size)
        if ids and not (min(ids) >= 0 and max(ids) < vocab):
            wrong = next(id for id in ids if not 0 <= id < vocab)
            raise InvalidRequest(f"{param}: token ids are from 0 to {vocab - 1}; got {wrong}", param=param)

    def request(
        self, prompt: Sequence[int], sampling: SamplingParams, param: str, default: int | None = None
    ) -> Request:
        """The engine's request for a prompt; refuses what could not fit. `param` is the field the prompt came in;
        without a max_tokens the answer has `default` tokens, or what the context has room for."""
        self.check_answers()
        noted = notes()
        made = make_request(
            self.client.next_id(),
            prompt,
            sampling,
            self.text.tokenizer,
            self.limits.max_len,
            param=param,
            default=default,
        )
        return made._replace(owner=noted.owner, explain=noted.explain)


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Runs `work` on text of `size` characters: in a thread when it is long."""
    return work() if size <= OFF_LOOP else await asyncio.to_thread(work)
