"""The waist: the frozen values that cross every seam of the engine. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.errors import InvalidRequest


class Thinking(NamedTuple):
    """Token ids around what a model says to itself before it answers."""

    closes: tuple[int, ...]
    opens: int = -1  # -1: it was opened in the prompt; else the answer may begin with it
    budget: int | None = None  # tokens, after which it is ended


class Grammar(NamedTuple):
    """What an answer must match, after the thinking where there may be some."""

    kind: str  # json (a schema), regex, lark, or free for any text at all
    text: str
    thinking: Thinking | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the next token and when to stop. `stop` is text and is watched for above the engine."""

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
    max_tokens: int | None = None  # None: to the end of the context
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives beside the chosen token; None: no logprobs
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        in_range = (
            ("temperature", self.temperature, 0.0, 100.0),
            ("top_p", self.top_p, 0.0, 1.0),
            ("top_k", self.top_k, 0, 2**31 - 1),
            ("min_p", self.min_p, 0.0, 1.0),
            ("presence_penalty", self.presence_penalty, -2.0, 2.0),
            ("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            ("max_tokens", self.max_tokens, 0, 2**31 - 1),
            ("min_tokens", self.min_tokens, 0, 2**31 - 1),
            ("logprobs", self.logprobs, 0, 20),
            ("prompt_logprobs", self.prompt_logprobs, 0, 20),
        )
        for name, value, low, high in in_range:
            if value is not None and not low <= value <= high:
                raise InvalidRequest(f"{name} must be between {low} and {high}; got {value}", param=name)
        if not 0.0 < self.repetition_penalty <= 100.0:
            raise InvalidRequest(
                f"repetition_penalty must be above 0 and at most 100; got {self.repetition_penalty}",
                param="repetition_penalty",
            )
        for token, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise InvalidRequest(
                    f"logit_bias must be between -100 and 100; got {bias} for token {token}", param="logit_bias"
                )
        if any(not text for text in self.stop):
            raise InvalidRequest("stop strings must not be empty", param="stop")


class Request(NamedTuple):
    """One token stream asked for: what a user sent, once text has become token ids."""

    id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()  # end-of-text ids and the caller's own, resolved
    priority: int = 0  # lower runs sooner
    salt: str = ""  # prompts share cached blocks only under the same salt
    pooling: str = ""  # mean, cls or last: an embedding of the prompt is wanted, and no tokens
    owner: str = ""  # whose it is: a report tells nobody of another's prompts
    explain: bool = False  # its report is to say which recent prompt it was nearest to


class Limits(NamedTuple):
    """What the engine can hold: decided once, before anything is allocated."""

    max_len: int  # tokens of one sequence, prompt and answer
    max_rows: int  # sequences in one step
    step_tokens: int  # tokens in one step
    block_size: int
    num_blocks: int
    vocab: int
    prefill_budget: int = 0  # tokens in one step while up to 64 rows answer; 0: step_tokens
    dim: int = 0  # values of a hidden state, and of an embedding
    pooling: str = "mean"  # what the model makes embeddings by
    encoder: bool = False  # embeddings are all it makes, each in one step
    states: int = 0  # of sequences, saved for others to begin with; 0: the model has none, its KV is all there is


def prefill_budget(base: int, answering: int) -> int:
    """Tokens of a step beside so many answering rows, where `base` suit up to 64: every 64 more add half as much again,
    because a step that answers more rows may take longer."""
    return base * (3 * -(-answering // 64) - 1) // 2


class Row(NamedTuple):
    """A sequence's share of a step: compute `count` positions from `start`, answer the last `sample` of them."""

    seq: int
    start: int
    count: int  # type: ignore[assignment]  # a row is no one's list: tuple.count is not missed
    sample: int
    begin: int = -1  # the saved state that it begins with; -1: its own, or none at position 0
    save: int = -1  # where its state is saved; -1: nowhere
    at: int = 0  # the position up to which that state has come


class Grown(NamedTuple):
    """Blocks a sequence took: they extend its block table from entry `at`."""

    seq: int
    at: int
    blocks: tuple[int, ...]


class StepPlan(NamedTuple):
    """What the scheduler decides for one step."""

    step: int
    rows: tuple[Row, ...]
    grown: tuple[Grown, ...] = ()
    dropped: tuple[int, ...] = ()  # sequences that lost their block table since the last plan


class TokenLogprob(NamedTuple):
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, logprob), most likely first


class RowResult(NamedTuple):
    """What the backend answers for one row."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each of `tokens`, when asked for
    scores: tuple[TokenLogprob, ...] = ()  # known prompt tokens that were scored, in order
    pooled: bytes = b""  # the hidden state that was asked for, in float32, little-endian


class StepResult(NamedTuple):
    step: int
    rows: tuple[RowResult, ...]  # parallel to the plan's rows


class Tokens(NamedTuple):
    seq: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    scores: tuple[TokenLogprob, ...] = ()
    cached: int = 0  # prompt tokens whose KV was reused


class Nearest(NamedTuple):
    """The recent stream of the same owner that shares most of its beginning with a prompt, and where the two part."""

    shared: int  # tokens
    held: int  # tokens of it whose KV was computed
    prompt: int  # of them, those before its answer
    before: tuple[int, ...] = ()  # the last that are shared
    had: tuple[int, ...] = ()  # how it went on; empty: it ended there
    got: tuple[int, ...] = ()  # how the prompt goes on


class Report(NamedTuple):
    """What happened to a request. Seconds are of the engine's clock."""

    cached: int = 0  # prompt tokens whose KV was reused
    queued: float = 0.0  # seconds until its first step
    prefill: float = 0.0  # from there to its first token
    decode: float = 0.0  # from there to its end
    preemptions: int = 0
    recomputed: int = 0  # tokens whose KV was lost to preemption and computed again
    compiling: float = 0.0  # seconds that it waited for its grammar, before it was queued
    forced: int = 0  # tokens that its grammar left no choice about
    nearest: Nearest | None = None  # where it was to be explained


class Finished(NamedTuple):
    seq: int
    reason: str  # "stop" or "length"; "pooled" where that was all that was wanted
    stop_token: int | None = None  # the token id that ended it; it is part of the Tokens events too
    pooled: bytes = b""  # see RowResult
    report: Report | None = None


class Aborted(NamedTuple):
    seq: int
    report: Report | None = None


class Failed(NamedTuple):
    seq: int
    code: str
    message: str


Event = Tokens | Finished | Aborted | Failed


STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens: bounds between kinds of steps


class Stats(NamedTuple):
    """The engine's state and counters; every metric is derived from these."""

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
    masks: int = 0  # of the tokens that a grammar allows
    mask_seconds: float = 0.0
    forced_tokens: int = 0  # of the generated ones: not sampled, as grammars left no choice
    computed_tokens: int = 0  # in all steps, of prompts and answers
    step_sizes: tuple[int, ...] = (0,) * (len(STEP_SIZES) + 1)  # steps with as many tokens as between two of STEP_SIZES


class Hello(NamedTuple):
    """The engine's first word to a client."""

    version: str
    pid: int
    model: str
    limits: Limits
