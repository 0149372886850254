"""Defines the events that an engine returns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from penstock.types.request import BlockOffer
from penstock.types.step import TokenLogprob

PAUSE_KEEP, PAUSE_WAIT, PAUSE_ABORT = PAUSE_MODES = ("keep", "wait", "abort")  # what becomes of running requests


FIRST_VERSION = "default"  # of the weights that a model is loaded with, as SGLang calls it


class Tokens(NamedTuple):
    """Tells that a request got further tokens, or scores of its prompt's tokens."""

    seq: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    scores: tuple[TokenLogprob, ...] = ()
    cached: int = 0  # prompt tokens whose KV was reused
    mirostat_mu: float | None = None  # mirostat's learned value, for an engine that resumes the answer


class Nearest(NamedTuple):
    """Describes the recent stream of the same owner that shares the longest prefix with a prompt, and where the two
    diverge."""

    shared: int  # tokens
    held: int  # tokens of that stream whose KV was computed
    prompt: int  # how many of them were its prompt
    before: tuple[int, ...] = ()  # the last shared tokens
    had: tuple[int, ...] = ()  # how that stream went on; empty: it ended there
    got: tuple[int, ...] = ()  # the prompt's next tokens


class WeightSpan(NamedTuple):
    """Says which weights computed an answer's tokens from one on, up to the next span."""

    version: str
    first: int = 0  # counts the answer's tokens; below 0 for scores of the prompt's last ones
    mixed: bool = False  # they saw KV that older weights had computed


class DraftCounts(NamedTuple):
    """Counts tokens that one source has drafted."""

    source: str  # prediction, text, recent or model
    drafted: int = 0
    accepted: int = 0
    drafts: int = 0  # in which they were drafted

    def plus(self, other: DraftCounts) -> DraftCounts:
        """Returns the counts of both."""
        counts = (mine + more for mine, more in zip(self[1:], other[1:], strict=True))
        return DraftCounts(self.source, *counts)


def add_drafts(every: Iterable[DraftCounts]) -> tuple[DraftCounts, ...]:
    """Returns counts added up by their sources."""
    found: dict[str, DraftCounts] = {}
    for counts in every:
        found[counts.source] = found.get(counts.source, DraftCounts(counts.source)).plus(counts)
    return tuple(found.values())


class Report(NamedTuple):
    """Reports the history of a request. Seconds are on the engine's clock."""

    cached: int = 0  # prompt tokens whose KV was reused
    queued: float = 0.0  # seconds until its first step
    prefill: float = 0.0  # seconds from there to its first token
    decode: float = 0.0  # seconds from there to its end
    preemptions: int = 0
    recomputed: int = 0  # tokens whose KV was lost to preemption and computed again
    waited: tuple[tuple[str, float], ...] = ()  # reason and seconds of each wait before it was queued
    forced: int = 0  # tokens that its grammar left no choice about
    drafts: tuple[DraftCounts, ...] = ()  # counts of every source that drafted for it
    nearest: Nearest | None = None  # set if Request.explain
    weights: tuple[WeightSpan, ...] = ()  # weights that computed it; several if they were updated meanwhile
    reused: tuple[tuple[str, int], ...] = ()  # the tiers that `cached` came from (device, ram, disk, peer), and tokens
    loop: int = 0  # tokens of the phrase that the answer repeated, if the loop guard ended it (its reason is "length")

    @property
    def compiling(self) -> float:
        """Returns the seconds that the request waited for its grammar."""
        return dict(self.waited).get("grammar", 0.0)


class Finished(NamedTuple):
    """Tells that a request was answered to its end."""

    seq: int
    reason: str  # "stop" or "length"; "pooled" for an embedding; "abort" if a pause ended it
    stop_token: int | None = None  # the token id that ended it; it is part of the Tokens events too
    pooled: bytes = b""  # see RowResult
    report: Report | None = None


class Aborted(NamedTuple):
    """Tells that a request was ended because its client asked for that."""

    seq: int
    report: Report | None = None


class Failed(NamedTuple):
    """Tells that a request could not be answered, with a stable code and a sentence for people."""

    seq: int
    code: str
    message: str
    retry_after: float = 0.0  # seconds, if it is known when the request may be sent again


class MemoryUse(NamedTuple):
    """Answers a Sleep or a Wake: what the model takes from now on, in bytes."""

    seq: int  # the message's id
    device: int
    host: int  # pinned, for weights while it sleeps


class WeightState(NamedTuple):
    """Answers a control message about pauses and weights: what holds once it was carried out."""

    seq: int = 0  # the message's id
    version: str = FIRST_VERSION
    path: str = ""  # source of the last update; empty: the model's own weights
    updates: int = 0
    paused: bool = False


class AdapterInfo(NamedTuple):
    """Describes a registered adapter."""

    name: str
    path: str
    scale: float
    rank: int  # the highest of its matrices
    digest: str = ""  # digest of its contents; empty until it was loaded once
    loaded: bool = False  # it is in a slot of the backend now


class AdapterList(NamedTuple):
    """Answers a control message about adapters: the one that was registered, or all that are."""

    seq: int  # the message's id
    adapters: tuple[AdapterInfo, ...]


class Offered(NamedTuple):
    """Answers an Offer; without blocks, there was nothing to offer or no room to keep it."""

    seq: int  # the message's id
    offer: BlockOffer | None = None


Event = Tokens | Finished | Aborted | Failed | AdapterList | WeightState | MemoryUse | Offered


class BlockStored(NamedTuple):
    """Reports that a full block of tokens entered the prefix cache. `number` counts an epoch's block events from 0;
    each start of an engine has another epoch, so that subscribers see gaps and restarts."""

    number: int
    epoch: int
    hash: bytes  # 16 bytes: the chain hash of the block and all before it
    parent: bytes  # the chain hash of the block before, or the root of its salt
    tokens: tuple[int, ...]


class BlockRemoved(NamedTuple):
    """Tells that a block left the prefix cache."""

    number: int
    epoch: int
    hash: bytes


BlockEvent = BlockStored | BlockRemoved


class BlockSnapshot(NamedTuple):
    """Lists the blocks that a prefix cache holds, for subscribers that missed events or begin to follow them."""

    epoch: int
    following: int  # the number of the first event that is not in it
    hashes: bytes  # chain hashes of 16 bytes, one after the other
