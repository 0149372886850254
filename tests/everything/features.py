"""Lists all features that a world has at once. A new one joins by one line: how a request or an engine has it, or what
happens, and how to see in a request's end that it had a part in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.text.grammar.call_grammar import call_grammar
from penstock.text.tool_formats import TOOL_FORMATS
from penstock.types import AdapterUse, DryPenalty, Grammar, Request, SamplerChain, Thinking
from tests.everything.recipe import Ask

if TYPE_CHECKING:
    from tests.everything.client import Client

END, OPEN, CLOSE = 256, 257, 258  # tokens that end texts, open and close thinking
HERMES = next(each for each in TOOL_FORMATS if each.name == "hermes")
TOOLS: dict[str, dict[str, Any]] = {
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "stop": {"type": "object", "properties": {}, "additionalProperties": False},
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["red", "green"]}, "b": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
REGEXES = (r"(abc)+", r"[a-m]{4,30}", r"\d{4}-\d{2}-[xyz]+", r"((ab){8}|[c-z]){2,9}")
LARK = 'start: part+\npart: "yes, " | "no. " | /[a-f]/ "!"'
ENCODER = "encoder"
Change = Callable[[Request, Ask, Random], Request]
Seen = Callable[["Client"], bool]


class Feature(NamedTuple):
    """Describes a feature. It is one of an `engine`, of a `request` (which has at most one of each `kind`), a `moment`
    or something that `emerges` from others. It cannot be had with those that are `apart` from it; of `text` are those
    that no embedding can have. `change` gives it to a
    request; `seen` says whether it had a part in what a client got. Of a `whole` world is what no request can live
    through."""

    name: str
    scope: str
    change: Change | None = None
    seen: Seen | None = None
    kind: str = ""
    apart: tuple[str, ...] = ()
    text: bool = False
    whole: bool = False

    def goes_with(self, other: Feature) -> bool:
        """Returns whether one engine or one request can have both."""
        same_kind = self.kind != "" and self.kind == other.kind
        no_text = {self.kind, other.kind} & {"embedding", ENCODER} and (self.text or other.text)
        return not (same_kind or no_text or self.name in other.apart or other.name in self.apart)

    def had_part(self, client: Client) -> bool:
        """Returns whether the feature had a part in what a client got."""
        has = {"engine": client.engine, "request": client.ask.features, "moment": client.lived, "emerges": {self.name}}
        return self.name in has[self.scope] and client.served and (self.seen is None or self.seen(client))


def own_adapter(id: int) -> str:
    """Returns the name of the adapter that only the request with this id uses."""
    return f"own {id}"


def _sampling(**fields: Any) -> Change:
    return lambda request, ask, random: request._replace(sampling=replace(request.sampling, **fields))


def _one_of(*changes: Change) -> Change:
    return lambda request, ask, random: random.choice(changes)(request, ask, random)


def _grammar(make: Callable[[Random], Grammar]) -> Change:
    def change(request: Request, ask: Ask, random: Random) -> Request:
        sampling = replace(request.sampling, grammar=make(random))
        return request._replace(sampling=sampling, stop_ids=request.stop_ids | {END})

    return change


def _fields(**fields: Any) -> Change:
    return lambda request, ask, random: request._replace(**fields)


def _marked(request: Request, ask: Ask, random: Random) -> Request:
    """Changes nothing: the client or the world acts."""
    return request


def _claim(**fields: Any) -> Change:
    return lambda request, ask, random: request._replace(claim=request.claim._replace(**fields))


def _stop_ids(request: Request, ask: Ask, random: Random) -> Request:
    return request._replace(stop_ids=request.stop_ids | {random.randrange(256) for _ in range(12)})


def _reused(tier: str) -> Seen:
    return lambda client: any(dict(report.reused).get(tier) for report in client.reports)


def _drafted(*sources: str) -> Seen:
    return lambda client: any(
        counts.accepted for report in client.reports for counts in report.drafts if counts.source in sources
    )


CHAINS = (
    SamplerChain(order=("top_k", "typical_p", "top_p", "min_p", "xtc", "temperature"), xtc_probability=0.5),
    SamplerChain(order=("temperature", "top_n_sigma"), top_n_sigma=1.0),
)
GRAMMAR = "grammar"

FEATURES = (
    # what requests ask for
    Feature("temperature", "request", _sampling(temperature=0.7, seed=11), kind="heat", text=True),
    Feature("sampler chain", "request", _one_of(*(_sampling(chain=each) for each in CHAINS)), kind="chain", text=True),
    Feature("mirostat", "request", _sampling(chain=SamplerChain(mirostat=2)), kind="chain", text=True),
    Feature(
        "penalties",
        "request",
        _one_of(*(_sampling(presence_penalty=each, frequency_penalty=each / 2) for each in (0.02, 0.5, 2.0))),
        text=True,
    ),
    Feature("steering", "request", _sampling(logit_bias={97: 3.0, 101: -5.0}, min_tokens=5), text=True),
    Feature("bad words", "request", _fields(bad_words=((97,), (98, 99))), text=True),
    Feature("logprobs", "request", _sampling(logprobs=2), text=True),
    Feature("prompt logprobs", "request", _sampling(prompt_logprobs=1), seen=lambda client: bool(client.scores)),
    Feature("JSON schema", "request", _grammar(lambda _: Grammar("json", json.dumps(SCHEMA))), kind=GRAMMAR, text=True),
    Feature("regex", "request", _grammar(lambda r: Grammar("regex", r.choice(REGEXES))), kind=GRAMMAR, text=True),
    Feature("Lark", "request", _grammar(lambda _: Grammar("lark", LARK)), kind=GRAMMAR, text=True),
    Feature(
        "choice", "request", _grammar(lambda _: Grammar.of_choices(["yes", "yesterday", "no"])), kind=GRAMMAR, text=True
    ),
    Feature(
        "tools",
        "request",
        _grammar(lambda _: Grammar("lark", call_grammar(HERMES, TOOLS, {}))),
        kind=GRAMMAR,
        text=True,
    ),
    Feature(
        "lazy grammar",
        "request",
        _grammar(lambda _: Grammar("regex", "[c-f](abc)+d", triggers=("c", "d", "e", "f"))),
        kind=GRAMMAR,
        text=True,
    ),
    Feature(
        "thinking budget",
        "request",
        _grammar(lambda r: Grammar("regex", "[a-f]{9}", thinking=Thinking((CLOSE,), budget=r.randint(1, 9)))),
        kind=GRAMMAR,
        apart=("logprobs",),
        text=True,
    ),
    Feature("allowed tokens", "request", _sampling(allowed_token_ids=tuple(range(90, 120))), kind=GRAMMAR, text=True),
    Feature("DRY", "request", _sampling(dry=DryPenalty(2.0, allowed_length=1)), text=True),
    Feature("stop ids", "request", _stop_ids, seen=lambda client: client.reason == "stop", text=True),
    Feature("stop strings", "request", _marked, seen=lambda client: client.stream.stopped is not None, text=True),
    Feature("loop guard", "request", _marked, seen=lambda client: client.loop > 0, apart=("temperature",), text=True),
    Feature("n", "request", _marked, text=True),
    Feature(
        "embedding",
        "request",
        _one_of(*(_fields(pooling=each, max_tokens=0) for each in ("mean", "last"))),
        kind="embedding",
    ),
    Feature(
        "first embedding",  # it ends with the prompt's first piece
        "request",
        _fields(pooling="cls", max_tokens=0),
        kind="embedding",
        apart=("prompt logprobs",),
    ),
    Feature("prediction", "request", _marked, seen=_drafted("prediction"), kind="drafts", text=True),
    Feature("no drafts", "request", _fields(speculation=0), kind="drafts", text=True),
    Feature("adapter", "request", _fields(adapters=(AdapterUse("eleven"),)), kind="adapter"),
    Feature(
        "two adapters", "request", _fields(adapters=(AdapterUse("eleven", 2.0), AdapterUse("seven"))), kind="adapter"
    ),
    Feature(
        "own adapter",  # which is registered for the request and unregistered while it runs
        "request",
        lambda request, ask, random: request._replace(adapters=(AdapterUse(own_adapter(request.id)),)),
        kind="adapter",
        seen=lambda client: client.outlived_adapter,
        apart=("hand-over",),
    ),
    Feature("salt", "request", _fields(salt="mine")),
    Feature("background", "request", _fields(background=True)),
    Feature("priority", "request", _fields(priority=1)),
    Feature("tenant", "request", _claim(tenant="other", weight=3.0)),
    Feature("deadline", "request", _claim(deadline=1.0, ttft=0.5)),
    Feature("explain", "request", _fields(explain=True)),
    Feature("not durable", "request", _fields(durable=False)),
    Feature("resumed", "request", _marked, text=True),
    Feature("pull", "request", _marked, seen=_reused("peer")),
    Feature("hand-over", "request", _marked, seen=lambda client: client.handed_over, text=True),
    Feature("abort", "request", _marked, seen=lambda client: client.aborted),
    # what engines have
    Feature("steps in flight", "engine"),
    Feature("windows", "engine"),
    Feature("states", "engine"),
    Feature("small cache", "engine"),
    Feature("RAM tier", "engine", seen=_reused("ram")),
    Feature("disk tier", "engine", seen=_reused("disk")),
    Feature("ledger", "engine", seen=lambda client: client.adopted),
    Feature("guesses", "engine", seen=_drafted("context"), kind="first drafter", text=True),
    Feature("copied drafts", "engine", seen=_drafted("prediction", "text", "recent"), kind="first drafter", text=True),
    Feature("draft model", "engine", seen=_drafted("model"), kind="second drafter", text=True),
    Feature("head", "engine", seen=_drafted("mtp"), kind="second drafter", text=True),
    Feature("random order", "engine"),
    Feature("block events", "engine"),
    Feature("admission", "engine", seen=lambda client: client.expected is not None),
    Feature(ENCODER, "engine", kind=ENCODER, apart=("states", "disk tier", "ledger", "prompt logprobs")),
    # what happens
    Feature("preemption", "emerges", seen=lambda client: any(report.preemptions for report in client.reports)),
    Feature("prefix reused", "emerges", seen=_reused("device")),
    Feature("pause keep", "moment"),
    Feature("pause wait", "moment"),
    Feature("pause abort", "moment", seen=lambda client: client.reason == "abort"),
    Feature("abort all", "moment", seen=lambda client: client.reason == "abort"),
    Feature("new weights", "moment"),
    Feature("mixed weights", "moment"),
    Feature("flush", "moment"),
    Feature("sleep", "moment", whole=True),
    Feature("death", "moment"),
    Feature("no memory", "moment"),
    Feature("failed step", "moment"),
    Feature("not finite", "moment"),
    Feature("failed copy", "moment"),
)
BY_NAME = {feature.name: feature for feature in FEATURES}
EMBEDDINGS = tuple(feature.name for feature in FEATURES if feature.kind == "embedding")
OF_ENGINES, OF_REQUESTS, MOMENTS = (
    tuple(feature for feature in FEATURES if feature.scope == scope) for scope in ("engine", "request", "moment")
)
