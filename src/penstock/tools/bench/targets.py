"""Sends a workload's requests to an engine or an OpenAI-compatible server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from penstock.errors import EngineUnavailable, InvalidRequest, PenstockError
from penstock.ipc.client import EngineClient
from penstock.tools.bench.http import Connection, split_url
from penstock.tools.bench.load import DraftTotals, RequestTiming
from penstock.types import Failed, Limits, Request, SamplingParams, Tokens

PLAIN_IDS = range(1000, 9000)  # ordinary tokens in common vocabularies
DRAFT_METRICS = (
    ("penstock_drafted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"),
    ("penstock_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"),
)
WORDS = """
    time year people way day man thing woman life child world school state family student group country problem
    hand part place case week company system program question work government number night point home water room
    mother area money story fact month lot right study book eye job word business issue side kind head house
""".split()  # noqa: SIM905


class EngineTarget:
    """Measures an engine without a server."""

    def __init__(self, client: EngineClient, limits: Limits) -> None:
        self.vocab = range(min(PLAIN_IDS.start, limits.vocab // 2), min(PLAIN_IDS.stop, limits.vocab))
        self._client = client

    async def complete(self, prompt: Sequence[int], max_tokens: int, timing: RequestTiming) -> None:
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        timing.prompt_tokens = len(prompt)
        timing.begin()
        async for events in self._client.submit(Request(self._client.next_id(), tuple(prompt), params, max_tokens)):
            for event in events:
                if isinstance(event, Failed):
                    raise EngineUnavailable(event.message)
                if isinstance(event, Tokens) and event.tokens:
                    timing.arrive()
                    timing.output_tokens += len(event.tokens)
                    timing.cached_tokens = max(timing.cached_tokens, event.cached)

    async def drafts(self) -> DraftTotals:
        counts = self._client.stats.drafts
        return DraftTotals(sum(each.drafted for each in counts), sum(each.accepted for each in counts))


class UrlTarget:
    """Measures `/completions` of a server. `negotiate` first detects the supported requests."""

    vocab = PLAIN_IDS

    def __init__(self, url: str, model: str = "", api_key: str = "") -> None:
        self.model = model
        self._url = split_url(url).geturl().rstrip("/")
        self._api_key = api_key
        self._takes_ids = True
        self._extras: dict[str, Any] = {}

    async def negotiate(self) -> None:
        """Finds the best kind of request that the server accepts: token ids before words, and full-length answers
        before answers that may end early.
        """
        self.model = self.model or await self._first_model()
        refusal: PenstockError | None = None
        for self._takes_ids in (True, False):
            for self._extras in ({"ignore_eos": True}, {}):
                try:
                    return await self.complete(self.vocab[:8], 2, RequestTiming())
                except InvalidRequest as error:
                    refusal = refusal or error
        raise refusal or InvalidRequest("the server accepts none of the known kinds of requests")

    async def complete(self, prompt: Sequence[int], max_tokens: int, timing: RequestTiming) -> None:
        body = {
            "model": self.model,
            "prompt": list(prompt) if self._takes_ids else " ".join(WORDS[id % len(WORDS)] for id in prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extras,
        }
        async with Connection(f"{self._url}/completions", self._api_key) as connection:
            timing.begin()
            answer = await connection.ask("POST", body)
            if answer.status != 200:
                raise _refusal(answer.status, await answer.json())
            async for event in answer.events():
                _take(event, timing)

    async def drafts(self) -> DraftTotals:
        """Reads the server's metrics under vLLM's names, which several engines use."""
        url = split_url(self._url)._replace(path="/metrics").geturl()
        try:
            async with Connection(url, self._api_key) as connection:
                answer = await connection.ask("GET")
                text = await answer.text() if answer.status == 200 else ""
        except PenstockError:
            return DraftTotals()
        return DraftTotals(*(_metric(text, *names) for names in DRAFT_METRICS))

    async def _first_model(self) -> str:
        async with Connection(f"{self._url}/models", self._api_key) as connection:
            answer = await connection.ask("GET")
            listed = await answer.json()
            if answer.status != 200 or not listed.get("data"):
                raise _refusal(answer.status, listed)
            return str(listed["data"][0]["id"])


def _metric(text: str, *names: str) -> int:
    """Returns the sum of a metric's samples; the first existing name counts."""
    for name in names:
        values = [line.rpartition(" ")[2] for line in text.splitlines() if re.match(rf"{name}[ {{]", line)]
        if values:
            return int(sum(map(float, values)))
    return 0


def _take(event: Any, timing: RequestTiming) -> None:
    if "error" in event:
        raise EngineUnavailable(str(event["error"]))
    if any(choice.get("text") or choice.get("finish_reason") is None for choice in event.get("choices", ())):
        timing.arrive()
        timing.output_tokens += 1
    if usage := event.get("usage"):
        timing.prompt_tokens = usage["prompt_tokens"]
        timing.output_tokens = usage["completion_tokens"]
        timing.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _refusal(status: int, body: Any) -> PenstockError:
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    kind = InvalidRequest if status in (400, 404, 422) else EngineUnavailable
    return kind(f"the server answered with status {status}: {message}")
