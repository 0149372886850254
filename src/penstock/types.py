"""Defines the waist: the frozen values that cross every seam of the engine. It imports the standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.adapter_types import AdapterInfo as AdapterInfo
from penstock.adapter_types import AdapterList as AdapterList
from penstock.adapter_types import AdapterRequests as AdapterRequests
from penstock.adapter_types import AdapterUse as AdapterUse
from penstock.carry_types import BlockOffer as BlockOffer
from penstock.carry_types import Offered as Offered
from penstock.carry_types import PeerCounts as PeerCounts
from penstock.claim_types import NO_CLAIM as NO_CLAIM
from penstock.claim_types import Claim as Claim
from penstock.control_types import FIRST_VERSION as FIRST_VERSION
from penstock.control_types import PAUSE_ABORT as PAUSE_ABORT
from penstock.control_types import PAUSE_KEEP as PAUSE_KEEP
from penstock.control_types import PAUSE_MODES as PAUSE_MODES
from penstock.control_types import PAUSE_WAIT as PAUSE_WAIT
from penstock.control_types import WeightSpan as WeightSpan
from penstock.control_types import WeightState as WeightState
from penstock.disk_types import DiskCounts as DiskCounts
from penstock.draft_types import DraftCounts as DraftCounts
from penstock.draft_types import add_drafts as add_drafts
from penstock.errors import InvalidRequest
from penstock.grammar_types import Grammar as Grammar
from penstock.grammar_types import StructuredOutputsParams as StructuredOutputsParams
from penstock.grammar_types import Thinking as Thinking
from penstock.sampler_types import SAMPLERS as SAMPLERS
from penstock.sampler_types import DryPenalty as DryPenalty
from penstock.sampler_types import SamplerChain as SamplerChain
from penstock.sampling_fields import read_fields

MOST = 2**31 - 1
BANNED = float("-inf")  # a logit bias that rules a token out


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Says how to choose the next token and when to stop. `stop`, `bad_words` and a DRY penalty's breakers are text:
    the layers above the engine watch for them or turn them into token ids."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = 16  # as in vLLM, whose scripts count on it; None: to the end of the context
    min_tokens: int = 0
    ignore_eos: bool = False
    loop_guard: bool = True  # a loop ends an answer at temperature 0; not with ignore_eos, nor before min_tokens
    logprobs: int | None = None  # how many alternatives beside the chosen token; None: no logprobs
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    penalty_window: int = -1  # -1: presence and frequency count the answer; n: all penalties count the last n tokens
    dry: DryPenalty | None = None
    chain: SamplerChain | None = None
    bad_words: tuple[str, ...] = ()  # never generated
    allowed_token_ids: tuple[int, ...] | None = None  # nothing else is generated
    include_stop_str_in_output: bool = False
    # `LLM` and `AsyncLLM` read the rest: the engine's request is one choice, and its tokens are no text yet.
    n: int = 1  # choices
    best_of: int | None = None  # choices that are generated; the n most likely ones are returned
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # without effect: no space is ever added
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None  # the prompt's last tokens that are used
    output_kind: int = 0  # a RequestOutputKind, of AsyncLLM
    structured_outputs: StructuredOutputsParams | None = None  # becomes the grammar
    guided_decoding: StructuredOutputsParams | None = None  # its older name

    def __post_init__(self) -> None:
        _normalize(self)
        for name, value, low, high in self._ranges():
            if value is not None and not low <= value <= high:  # a NaN is in no range
                raise InvalidRequest(f"{name} must be between {low} and {high}; got {value}", param=name)
        if not 0.0 < self.repetition_penalty <= 100.0:
            raise InvalidRequest(
                f"repetition_penalty must be above 0 and at most 100; got {self.repetition_penalty}",
                param="repetition_penalty",
            )
        for token, bias in self.logit_bias.items():
            if not (-100.0 <= bias <= 100.0 or bias == BANNED):
                raise InvalidRequest(
                    f"logit_bias must be between -100 and 100, or -inf for a ban; got {bias} for token {token}",
                    param="logit_bias",
                )
        for name, texts in (("stop", self.stop), ("bad_words", self.bad_words)):
            if any(not text for text in texts):
                raise InvalidRequest(f"{name} strings must not be empty", param=name)
        self._check_allowed()
        self._check_order()

    def _ranges(self) -> Iterator[tuple[str, float | None, float, float]]:
        """Yields the name, value, lowest and highest value of every number that has a range."""
        yield "temperature", self.temperature, 0.0, 100.0
        yield "top_p", self.top_p, 0.0, 1.0
        yield "top_k", self.top_k, 0, MOST
        yield "min_p", self.min_p, 0.0, 1.0
        yield "presence_penalty", self.presence_penalty, -2.0, 2.0
        yield "frequency_penalty", self.frequency_penalty, -2.0, 2.0
        yield "max_tokens", self.max_tokens, 0, MOST
        yield "min_tokens", self.min_tokens, 0, MOST
        yield "logprobs", self.logprobs, 0, 20
        yield "prompt_logprobs", self.prompt_logprobs, 0, 20
        yield "seed", self.seed, -(2**63), 2**64 - 1
        yield "n", self.n, 1, 1024
        yield "best_of", self.best_of, self.n, 1024
        yield "truncate_prompt_tokens", self.truncate_prompt_tokens, 1, MOST
        yield "penalty_window", self.penalty_window, -1, MOST
        if self.dry is not None:
            yield "dry_multiplier", self.dry.multiplier, 0.0, 1000.0
            yield "dry_base", self.dry.base, 1.0, 1000.0
            yield "dry_allowed_length", self.dry.allowed_length, 0, MOST
            yield "dry_penalty_last_n", self.dry.window, -1, MOST
        if self.chain is not None:
            yield "top_n_sigma", self.chain.top_n_sigma, -1.0, 1000.0
            yield "typical_p", self.chain.typical_p, 0.0, 1.0
            yield "xtc_probability", self.chain.xtc_probability, 0.0, 1.0
            yield "xtc_threshold", self.chain.xtc_threshold, 0.0, 1.0
            yield "dynatemp_range", self.chain.dynatemp_range, 0.0, 100.0
            yield "dynatemp_exponent", self.chain.dynatemp_exponent, 0.0, 100.0
            yield "mirostat", self.chain.mirostat, 0, 2
            yield "mirostat_tau", self.chain.mirostat_tau, 0.0, 100.0
            yield "mirostat_eta", self.chain.mirostat_eta, 0.0, 100.0
            yield "min_keep", self.chain.min_keep, 0, MOST

    def _check_allowed(self) -> None:
        if self.allowed_token_ids is None:
            return
        if not self.allowed_token_ids:
            raise InvalidRequest(
                "allowed_token_ids is empty, which allows no answer: name at least one token, or leave it out",
                param="allowed_token_ids",
            )
        if self.grammar is not None:
            raise InvalidRequest(
                "allowed_token_ids cannot be combined with structured output, forced tools or a thinking budget: "
                "send one of them",
                param="allowed_token_ids",
            )

    def _check_order(self) -> None:
        for name in self.chain.order if self.chain is not None else ():
            if name not in SAMPLERS:
                known = ", ".join(sorted(SAMPLERS))
                raise InvalidRequest(f"samplers: {name!r} is not one of {known}", param="samplers")


def _normalize(params: SamplingParams) -> None:
    """Writes the forms in which users may give a field as the one that the engine reads: a text or a list as a tuple, a
    number of NumPy's as Python's, vLLM's -1 of top_k as 0, and a structured output as its grammar."""
    changed = read_fields(params)
    if params.top_k == -1:
        changed["top_k"] = 0
    if outputs := changed.get("structured_outputs") or changed.get("guided_decoding"):
        changed |= {"grammar": outputs.to_grammar(), "structured_outputs": None, "guided_decoding": None}
    for name, value in changed.items():
        object.__setattr__(params, name, value)


class Request(NamedTuple):
    """Asks for one token stream: it is what a user sent, once text has become token ids."""

    id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()  # end-of-text ids and the caller's own, resolved
    priority: int = 0  # lower runs sooner
    salt: str = ""  # prompts share cached blocks only under the same salt
    pooling: str = ""  # mean, cls or last: an embedding is wanted; classify: the logits of the model's labels
    owner: str = ""  # who sent it: a report tells nobody about another owner's prompts
    explain: bool = False  # its report is to say which recent prompt it was nearest to
    background: bool = False  # may wait: runs behind every foreground request and never crowds them out
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that the answer never completes
    dry_breakers: tuple[tuple[int, ...], ...] = ()  # token sequences that spell a breaker of the DRY penalty
    adapters: tuple[AdapterUse, ...] = ()  # their updates add up
    prediction: tuple[int, ...] = ()  # how the client expects the answer to go on: it is drafted first
    speculation: int | None = None  # the most tokens that a step may draft for it; 0: none; None: as many as pay
    claim: Claim = NO_CLAIM  # whose share of the engine it uses, and how soon it is to be answered
    generated: tuple[int, ...] = ()  # tokens of its answer that another engine has delivered already: it is resumed
    scored: int = 0  # scores of its prompt's tokens that were delivered, if nothing was generated yet
    mirostat_mu: float | None = None  # what mirostat had learned by then, see Tokens
    durable: bool = True  # the KV of its prompt may be kept on disk, for requests with the same salt
    pull: BlockOffer | None = None  # blocks of its prompt that another engine has: they are read before it runs


class Limits(NamedTuple):
    """States what the engine can hold. It is decided once, before anything is allocated."""

    max_len: int  # tokens of one sequence, prompt and answer
    max_rows: int  # sequences in one step
    step_tokens: int  # tokens in one step
    block_size: int
    num_blocks: int
    vocab: int
    prefill_budget: int = 0  # tokens in one step while up to 64 rows answer; 0: step_tokens
    dim: int = 0  # values of a hidden state, and of an embedding
    pooling: str = "mean"  # how the model pools hidden states into an embedding
    encoder: bool = False  # the model makes embeddings only, each in one step
    states: int = 0  # places for saved recurrent states; 0: the model has none, its KV is all there is
    generates: bool = True  # else the model has embeddings and labels, and no text
    labels: tuple[str, ...] = ()  # what the model classifies prompts into; empty: it has no classification head
    activation: str = ""  # what turns the logits of labels into scores: sigmoid, softmax or identity
    second_text: int = 0  # is added to the token ids of a pair's second text
    windows: tuple[int, ...] = (0,)  # per KV layer group: how many positions its layers see; 0: all of them
    host_places: int = 0  # blocks that host memory keeps when they leave the device; 0: they are forgotten
    host_states: int = 0  # saved states that host memory keeps when their places are needed
    memory: int = 0  # bytes that the weights and what is kept of sequences take, without adapters; 0: not known


def prefill_budget(base: int, answering: int) -> int:
    """Returns the tokens that a step may have while `answering` rows decode, where `base` suits up to 64 of them. Every
    64 more rows add one and a half times `base`, because a step that answers more rows may take longer."""
    return base * (3 * -(-answering // 64) - 1) // 2


def blocks_for(tokens: int, windows: tuple[int, ...], block_size: int, chunk: int = 1) -> int:
    """Returns how many blocks, of all layer groups together, a sequence of up to `tokens` tokens may hold at once while
    its steps compute at most `chunk` of them. Within a window only those blocks are held that the step still reads or
    writes: positions from `window - 1` before the chunk to its end, wherever in a block these begin."""
    whole = -(-tokens // block_size)
    return sum(min(whole, -(-(window + chunk - 2) // block_size) + 1) if window else whole for window in windows)


class Row(NamedTuple):
    """Gives a sequence's share of a step: compute `count` positions from `start`, answer the last `sample` of them. The
    last positions hold the `draft`: tokens that are right if they are what is sampled one position before them."""

    seq: int
    start: int
    count: int  # type: ignore[assignment]  # a row is no one's list: tuple.count is not missed
    sample: int
    begin: int = -1  # the saved state that it begins with; -1: its own, or none at position 0
    save: int = -1  # the place where its state is saved; -1: nowhere
    at: int = 0  # how many positions the saved state covers
    draft: tuple[int, ...] = ()


class Grown(NamedTuple):
    """Tells which blocks a sequence took in one layer group: they are written to its block table from entry `at`."""

    seq: int
    at: int
    blocks: tuple[int, ...]
    group: int = 0


class BlockCopy(NamedTuple):
    """Asks for a copy of one block, or of one saved state, between the device and a place in host memory."""

    block: int
    place: int
    direction: str  # "in": from the place to the block; "out": from the block to the place


class StepPlan(NamedTuple):
    """States what the scheduler has decided for one step."""

    step: int
    rows: tuple[Row, ...]
    grown: tuple[Grown, ...] = ()
    dropped: tuple[int, ...] = ()  # sequences that lost their block tables since the last plan
    copies: tuple[BlockCopy, ...] = ()  # in this order, before the step
    state_copies: tuple[BlockCopy, ...] = ()  # of saved recurrent states, likewise

    @property
    def loads(self) -> bool:
        """Returns whether blocks or states are copied in before the step, which may wait for them."""
        return any(copy.direction == "in" for copy in (*self.copies, *self.state_copies))


class TokenLogprob(NamedTuple):
    """Gives a token's logarithmic probability and those of the likeliest alternatives."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, logprob), most likely first


class RowResult(NamedTuple):
    """Holds what the backend answers for one row, and how much of its draft turned out right."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each of `tokens`, when asked for
    scores: tuple[TokenLogprob, ...] = ()  # known prompt tokens that were scored, in order
    pooled: bytes = b""  # the hidden state or the logits that were asked for, in float32, little-endian
    surprise: float | None = None  # bits, of the sampled token among mirostat's candidates
    accepted: int = 0  # drafted tokens that were sampled too: `tokens` begins with them


class StepResult(NamedTuple):
    """Holds what the backend answers for one step."""

    step: int
    rows: tuple[RowResult, ...]  # parallel to the plan's rows
    not_finite: tuple[int, ...] = ()  # indices of rows that have no answer, because it would not be made of numbers


class Tokens(NamedTuple):
    """Tells that a request got further tokens, or scores of its prompt's tokens."""

    seq: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    scores: tuple[TokenLogprob, ...] = ()
    cached: int = 0  # prompt tokens whose KV was reused
    mirostat_mu: float | None = None  # with mirostat: what it has learned, for an engine that resumes the answer


class Nearest(NamedTuple):
    """Describes the recent stream of the same owner that shares the longest prefix with a prompt, and where the two
    diverge."""

    shared: int  # tokens
    held: int  # tokens of that stream whose KV was computed
    prompt: int  # how many of them were its prompt
    before: tuple[int, ...] = ()  # the last shared tokens
    had: tuple[int, ...] = ()  # how that stream went on; empty: it ended there
    got: tuple[int, ...] = ()  # how the prompt goes on


class Report(NamedTuple):
    """Tells what happened to a request. Seconds are those of the engine's clock."""

    cached: int = 0  # prompt tokens whose KV was reused
    queued: float = 0.0  # seconds until its first step
    prefill: float = 0.0  # seconds from there to its first token
    decode: float = 0.0  # seconds from there to its end
    preemptions: int = 0
    recomputed: int = 0  # tokens whose KV was lost to preemption and computed again
    waited: tuple[tuple[str, float], ...] = ()  # for what, and seconds, before it was queued
    forced: int = 0  # tokens that its grammar left no choice about
    drafts: tuple[DraftCounts, ...] = ()  # of every source that drafted for it
    nearest: Nearest | None = None  # set if Request.explain
    weights: tuple[WeightSpan, ...] = ()  # that computed it; several if they were updated on the way
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


Event = Tokens | Finished | Aborted | Failed | AdapterList | WeightState | MemoryUse | Offered


class BlockStored(NamedTuple):
    """Tells that a full block of tokens entered the prefix cache. `number` counts an epoch's block events from 0; the
    epoch differs between any two lives of an engine, so that whoever follows the events sees gaps and restarts."""

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
    """Lists the blocks that a prefix cache holds, for whoever has missed events or begins to follow them."""

    epoch: int
    following: int  # the number of the first event that is not in it
    hashes: bytes  # chain hashes of 16 bytes, one after the other


STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens: bounds of a histogram


class Stats(NamedTuple):
    """Holds the engine's state and counters; every metric is derived from these."""

    running: int = 0
    waiting: int = 0
    blocks_free: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    steps: int = 0
    prompt_tokens: int = 0  # computed or reused, of admitted prompts
    cached_tokens: int = 0  # reused
    generated_tokens: int = 0
    preemptions: int = 0
    busy_seconds: float = 0.0  # spent in steps
    grammars: int = 0  # compiled
    grammar_seconds: float = 0.0  # spent on compiling them, beside the steps
    masks: int = 0  # bitmasks of allowed tokens that were computed
    mask_seconds: float = 0.0
    forced_tokens: int = 0  # generated without sampling, because a grammar left no choice
    computed_tokens: int = 0  # in all steps, of prompts and answers
    step_sizes: tuple[int, ...] = (0,) * (len(STEP_SIZES) + 1)  # a histogram of steps by tokens, see STEP_SIZES
    adapter_slots: int = 0  # most adapters in memory at once
    adapter_bytes: int = 0  # that the adapters in memory take
    adapters: tuple[AdapterRequests, ...] = ()  # those that requests name now
    drafts: tuple[DraftCounts, ...] = ()  # of every source, for requests that have ended
    adopted_blocks: int = 0  # that the engine before had computed
    reused: tuple[tuple[str, int], ...] = ()  # cached_tokens by the tier that they came from (device, ram, disk, peer)
    host_blocks: int = 0  # blocks that host memory keeps
    host_places: int = 0  # that it has room for
    copied_in: int = 0  # blocks that came back from there
    copied_out: int = 0  # blocks that went there
    disk: DiskCounts = DiskCounts()
    in_line: int = 0  # requests that could run and find no room; others wait for a grammar or the end of a pause
    peers: PeerCounts = PeerCounts()
    uncached_tokens: int = 0  # of prompts, still to be computed; counted if block events are recorded
    clients: int = 1  # that share the engine
    step_seconds: tuple[float, ...] = ()  # measured: of a prompt's token, of a pair of such, of a step that answers
    background: int = 0  # requests that may wait; counted if block events are recorded
    background_tokens: int = 0  # of uncached_tokens, those of such requests
    prefilling: tuple[int, ...] = ()  # ids of running requests that have no token yet; of several clients, its own


class Hello(NamedTuple):
    """Introduces the engine to a client: it is the first message."""

    version: str
    pid: int
    model: str
    limits: Limits
    adapters: tuple[AdapterInfo, ...] = ()  # that were registered when it started
    unknown_fields: tuple[str, ...] = ()  # of the model's config.json: nothing is known of them
    can_sleep: bool = False  # it can give its memory back and stay
    draft_tokens: int = 0  # the most that a step drafts for one request; 0: it drafts nothing
    epoch: int = 0  # of its block events; 0: it records none
    address: str = ""  # where further clients can join; empty: it serves one client
    can_stand_by: bool = False  # another process can have the same KV cache open, and take over
    device: str = ""  # whose memory it can share with other engines, by a name that they know it by, too
