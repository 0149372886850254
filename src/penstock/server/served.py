"""What a server serves: an engine, the text side of its model, and the name clients know it by."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from penstock.errors import EngineUnavailable, InvalidRequest, ModelNotFound
from penstock.ipc.client import EngineClient
from penstock.server.metrics import Metrics
from penstock.server.notes import notes
from penstock.text import Text, make_request
from penstock.types import Limits, Request, SamplingParams

T = TypeVar("T")

OFF_LOOP = 4096  # characters: encoding more than this would hold up every other stream


class Served(NamedTuple):
    client: EngineClient
    text: Text
    name: str
    created: int  # seconds since 1970
    metrics: Metrics
    path: Path | None = None  # of the model's files, where they are known
    lenient: bool = False  # fields that are not known are ignored, and listed in the answer

    @property
    def limits(self) -> Limits:
        if self.client.hello is None:
            raise EngineUnavailable(self.client.trouble)
        return self.client.hello.limits

    def check_model(self, name: str) -> None:
        if name != self.name:
            raise ModelNotFound(f"the model {name!r} does not exist here; this server serves {self.name!r}")

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
