"""Collects the events of requests into outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.llm.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from penstock.text import REPETITION, Delta, TextStream, Tokenizer, read_step
from penstock.types import Event, Request, SamplingParams, TokenLogprob


class PendingChoice:
    """Collects the events of one engine request. One thread may add events while another reads."""

    def __init__(self, request: Request, text: TextStream) -> None:
        self.request = request
        self.finish_reason = ""  # empty while running
        self.deltas: list[Delta] = []
        self.on_end: Callable[[], object] = lambda: None
        self._failure: Exception | None = None
        self._text = text
        self._taken = 0  # deltas with taken text

    def add(self, events: Sequence[Event]) -> None:
        try:
            delta = read_step(self._text, events)
        except Exception as error:  # affects only this request: the step has events of others
            self.fail(error)
        else:
            self.deltas.append(delta)
            self.finish_reason = delta.finish or ""

    def fail(self, error: Exception) -> None:
        self._failure, self.finish_reason = error, "failed"

    def ended(self) -> bool:
        """Returns True if the request has ended; raises its error, if any."""
        if self._failure is not None:
            raise self._failure
        return bool(self.finish_reason)

    @property
    def pooled(self) -> bytes:
        return self.deltas[-1].pooled

    @property
    def likelihood(self) -> float:
        """Returns the sum of the answer's log-probabilities, if requested."""
        return sum(entry.logprob for delta in self.deltas for entry in delta.logprobs)

    def take_text(self) -> str:
        new = self.deltas[self._taken :]
        self._taken += len(new)
        return "".join(delta.text for delta in new)


@dataclass(slots=True)
class PendingOutput:
    """Holds one prompt and its choices."""

    id: str
    prompt: str | None
    params: SamplingParams
    tokenizer: Tokenizer
    choices: list[PendingChoice]

    def ended(self) -> bool:
        """Returns True if all choices have ended; raises the first error, if any."""
        ended = [choice.ended() for choice in self.choices]  # evaluated for all, since any may have failed
        return all(ended)

    def output(self, since: Sequence[int] | None = None) -> RequestOutput:
        """Returns the output so far; raises a choice's error, if any. `since` has the number of already returned deltas
        of each choice, which are left out.
        """
        finished = self.ended()
        first = self.choices[0]
        scores = [score for delta in first.deltas for score in delta.scores]
        wants_scores = self.params.prompt_logprobs is not None
        begins = [0] * len(self.choices) if since is None else since
        outputs = [self._completion(choice, begin) for choice, begin in zip(self.choices, begins, strict=True)]
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=list(first.request.prompt),
            outputs=_numbered(self._best(outputs) if finished else outputs),
            finished=finished,
            prompt_logprobs=[None, *map(self._logprobs, scores)] if wants_scores else None,
            num_cached_tokens=max((delta.cached for delta in first.deltas), default=0),
        )

    def _best(self, outputs: list[CompletionOutput]) -> list[CompletionOutput]:
        """Returns the n most likely choices, if more were generated."""
        if len(outputs) <= self.params.n:
            return outputs
        order = sorted(range(len(outputs)), key=lambda at: -self.choices[at].likelihood)
        return [outputs[at] for at in order[: self.params.n]]

    def _completion(self, choice: PendingChoice, begin: int) -> CompletionOutput:
        deltas = choice.deltas[begin:]
        logprobs = [entry for delta in deltas for entry in delta.logprobs]
        wanted = self.params.logprobs is not None
        return CompletionOutput(
            index=0,
            text="".join(delta.text for delta in deltas) if self.params.detokenize else "",
            token_ids=[token for delta in deltas for token in delta.tokens],
            cumulative_logprob=choice.likelihood if wanted else None,
            logprobs=[self._logprobs(entry) for entry in logprobs] if wanted else None,
            finish_reason=choice.finish_reason or None,
            stop_reason=self._stop_reason(deltas[-1]) if deltas else None,
            weights=deltas[-1].report.weights if deltas and deltas[-1].report else (),
        )

    def _stop_reason(self, last: Delta) -> int | str | None:
        if last.silent and last.tokens[-1] in self.params.stop_token_ids:
            return last.tokens[-1]
        return REPETITION if last.loop else last.stop

    def _logprobs(self, entry: TokenLogprob) -> PositionLogprobs:
        found = {entry.token: Logprob(entry.logprob, None, self.tokenizer.token_text(entry.token))}
        for rank, (token, logprob) in enumerate(entry.top, 1):
            found[token] = Logprob(logprob, rank, self.tokenizer.token_text(token))
        return found


def _numbered(outputs: list[CompletionOutput]) -> list[CompletionOutput]:
    return [replace(output, index=index) for index, output in enumerate(outputs)]
