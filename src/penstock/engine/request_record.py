"""Holds the engine's state of one request, and resumes answers that another engine began."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.core import Sequence, SequenceParams
from penstock.engine.grammars.grammar import Constraint
from penstock.engine.lora.adapters import AdapterLease
from penstock.engine.samplers.sampler import Sampler
from penstock.model.classifier import ClassifierHead, DenseHead
from penstock.types import (
    Aborted,
    Event,
    Failed,
    Finished,
    Report,
    Request,
    SamplingParams,
    Tokens,
    WeightSpan,
    WeightState,
)

FIRST_WEIGHTS = WeightState()

if TYPE_CHECKING:
    from penstock.engine.chain_loads import ChainLoad
    from penstock.engine.drafts.speculation import RequestDrafts
    from penstock.engine.kv_disk.disk_reads import RequestOnDisk


class RequestRecord:
    """Holds the sampler, constraint, drafts and waits of one request."""

    __slots__ = (
        "classifier",
        "constraint",
        "dense",
        "disk",
        "drafts",
        "lease",
        "owed",
        "pull",
        "request",
        "sampler",
        "waited",
        "weights",
    )

    def __init__(self, request: Request, vocab: int = 0) -> None:
        self.request = request
        self.dense: DenseHead | None = None
        self.classifier: ClassifierHead | None = None
        self.sampler = Sampler(request, vocab=vocab)
        self.constraint: Constraint | None = None
        self.drafts: RequestDrafts | None = None
        self.disk: RequestOnDisk | None = None  # what its prompt is called there, if it may be there
        self.pull: ChainLoad | None = None  # the read of its prompt from another engine
        self.lease: AdapterLease | None = None  # lease of its adapters
        self.waited: dict[str, float] = {}  # seconds by reason, before it was queued
        self.weights: list[WeightSpan] = []  # weights that compute it
        self.owed: tuple[int, ...] = ()  # tokens that its constraint forces next, if its answer is resumed there

    @property
    def mirostat(self) -> bool:
        chain = self.request.sampling.chain
        return chain is not None and chain.mirostat > 0

    def constrain(self, constraint: Constraint) -> None:
        """Makes the answer follow a constraint. It ends where its grammar does, even if it ignores other ends. The
        constraint follows the tokens generated before a resume again."""
        self.request = self.request._replace(stop_ids=self.request.stop_ids | constraint.ends)
        self.constraint = constraint
        self.owed = constraint.resume(self.request.generated, force=self.request.sampling.logprobs is None)
        self.sampler = Sampler(self.request, constraint)

    def adapt(self) -> None:
        """Makes the request's KV its adapters' own, once they are in their slot; raises if they could not be."""
        assert self.lease is not None
        self.lease.check()
        self.request = self.request._replace(salt=self.request.salt + self.lease.salt)

    @property
    def adapter_slot(self) -> int:
        """Returns the slot of its adapters; -1 if it has none."""
        return -1 if self.lease is None else self.lease.slot

    @property
    def pools_from_start(self) -> bool:
        """Returns whether its embedding needs hidden states of the prompt's beginning, which no cache keeps."""
        return self.pooling in ("mean", "cls")

    @property
    def pooling(self) -> str:
        return self.classifier.pooling if self.classifier else self.request.pooling

    def salt(self, weights: WeightState) -> str:
        """Returns the salt of its prompt's KV: the caller's salt, the adapters, and the weights. An update's number
        distinguishes weights with the same version."""
        updated = f"\0weights {weights.updates} {weights.version}" if weights.updates else ""
        return self.request.salt + updated

    def change_weights(self, sequence: Sequence, weights: WeightState, recompute: bool) -> None:
        """Notes that other weights compute what follows. If nothing was answered yet, they compute all of it."""
        known = sequence.scored if sequence.scored < sequence.prompt_len else len(sequence.tokens)
        mixed = not recompute and sequence.computed > 0
        if known == (1 if sequence.params.score else sequence.prompt_len):
            self.weights = [WeightSpan(weights.version, 0, mixed)]
        else:
            self.weights.append(WeightSpan(weights.version, known - sequence.prompt_len, mixed))

    def sequence(self, prefix_cache: bool, weights: WeightState = FIRST_WEIGHTS) -> Sequence:
        request = self.request
        self.weights = [WeightSpan(weights.version)]
        return Sequence(
            request.id,
            request.prompt,
            request.max_tokens,
            SequenceParams(
                stop_ids=request.stop_ids,
                priority=request.priority,
                score=request.sampling.prompt_logprobs is not None,
                lockstep=Sampler.needs_history(request),
                owner=request.owner,
                explain=request.explain,
                background=request.background,
                claim=request.claim,
                guarded_from=_guarded_from(request.sampling),
            ),
            salt=self.salt(weights),
            prefix_cache=prefix_cache,
            generated=request.generated,
            scored=request.scored,
        )

    def complete_tokens(self, event: Tokens) -> Tokens:
        if self.owed:
            event = event._replace(tokens=self.owed + event.tokens)
            self.owed = ()
        return event._replace(mirostat_mu=self.sampler.mu) if self.mirostat else event

    def complete(self, event: Finished | Aborted | Failed) -> Event:
        """Returns the request's last event with the logits of its labels, or its embedding, and with what the engine
        knows for its report, if it has them."""
        head = self.classifier or self.dense
        if head and isinstance(event, Finished):
            event = event._replace(pooled=head.answer(event.pooled))
        if isinstance(event, Failed) or event.report is None:
            return event
        report = event.report._replace(
            waited=tuple(self.waited.items()),
            forced=self.constraint.forced if self.constraint else 0,
            weights=tuple(self.weights),
            drafts=tuple(self.drafts.counts) if self.drafts else (),
        )
        return event._replace(report=report)


def _guarded_from(sampling: SamplingParams) -> int | None:
    """Returns how many tokens an answer has before a loop may end it; None: a loop never does."""
    guarded = sampling.loop_guard and sampling.temperature == 0.0 and not sampling.ignore_eos
    return sampling.min_tokens if guarded else None


class Decided(NamedTuple):
    """Holds the decided continuation of a resumed answer: tokens, and whether and at which token it ends."""

    tokens: tuple[int, ...] = ()
    ended: bool = False
    stop: int | None = None
    loop: int = 0  # tokens of the phrase that it repeated, if the loop guard ends it

    def events(self, record: RequestRecord) -> list[Event]:
        id, reason = record.request.id, "length" if self.stop is None else "stop"
        told: list[Event] = [Tokens(id, self.tokens)] if self.tokens else []
        return [*told, record.complete(Finished(id, reason, self.stop, report=Report(loop=self.loop)))]


def append_decided(sequence: Sequence, owed: tuple[int, ...]) -> Decided:
    """Appends the tokens that must follow to a resumed sequence, and returns the decided continuation. Its last token
    may end it, if the engine that generated the token died before it reported the end."""
    if len(sequence.tokens) == sequence.prompt_len:
        return Decided()
    last = sequence.tokens[-1]
    if last in sequence.params.stop_ids:
        return Decided((), True, last)
    if sequence.looped:
        return Decided((), True, loop=sequence.times.loop)
    tokens, stop = sequence.append(owed)
    ended = stop is not None or len(sequence.tokens) >= sequence.max_len
    return Decided(tokens, ended, stop, sequence.times.loop)
