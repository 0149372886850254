"""Defines how a request's tokens are chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

from penstock.errors import InvalidRequest
from penstock.types.grammar import Grammar, StructuredOutputsParams
from penstock.types.samplers import SAMPLERS, DryPenalty, SamplerChain
from penstock.types.sampling_fields import read_fields

MOST = 2**31 - 1
BANNED = float("-inf")  # a logit bias that rules a token out
LEAST_TEMPERATURE = 1e-5  # a lower one is 0, as in vLLM: logits are single-precision numbers that it would overflow

T = TypeVar("T")


def _normalized(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields in the forms that engines read: a text or a list as a tuple, a NumPy number as Python's,
    vLLM's top_k of -1 as 0, a temperature close to 0 as 0, and a structured output as its grammar."""
    fields = read_fields(fields)
    if 0 < fields.get("temperature", 1.0) < LEAST_TEMPERATURE:
        fields["temperature"] = 0.0
    if fields.get("top_k") == -1:
        fields["top_k"] = 0
    if outputs := fields.get("structured_outputs") or fields.get("guided_decoding"):
        fields |= {"grammar": outputs.to_grammar(), "structured_outputs": None, "guided_decoding": None}
    return fields


def _normalizing(cls: type[T]) -> type[T]:
    """Makes a class normalize the fields that its constructor is given."""
    construct = cls.__init__

    @wraps(construct)
    def __init__(self: T, **fields: Any) -> None:
        construct(self, **_normalized(fields))

    setattr(cls, "__init__", __init__)  # noqa: B010
    return cls


@_normalizing
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
    logprobs: int | None = None  # alternatives besides the chosen token; None: no logprobs
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
        for name, value, low, high in self._ranges():
            if value is not None and not low <= value <= high:  # a NaN is in no range
                raise InvalidRequest(f"{name} must be between {low} and {high}; got {value}", param=name)
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
        yield "repetition_penalty", self.repetition_penalty, 0.01, 100.0
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
