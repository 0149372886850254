"""From logits to tokens and logprobs, on the device; see backend/sample.py for what that means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import triton

from penstock.backend.base import LogitEdit, SampleRows
from penstock.backend.cuda.inputs import Fields
from penstock.backend.cuda.kernels.apply_bitmask import apply_bitmask
from penstock.backend.cuda.kernels.sample_tokens import CHUNK, find_chunk_maxima, sample_tokens
from penstock.backend.cuda.kernels.sampling_threshold import ThresholdScratch, sampling_threshold
from penstock.types import TokenLogprob


class PendingLogprobs(NamedTuple):
    """Logprobs that are still on their way from the device."""

    tops: Sequence[int]  # how many alternatives each of the positions wants
    values: Any  # [n, 1 + most] the token's own logprob, then those of the most likely
    tokens: Any  # [n, 1 + most]

    def read(self) -> list[TokenLogprob]:
        entries = zip(self.tops, self.tokens.tolist(), self.values.tolist(), strict=True)
        return [
            TokenLogprob(tokens[0], values[0], tuple(zip(tokens[1 : top + 1], values[1 : top + 1], strict=True)))
            for top, tokens, values in entries
        ]


@dataclass(slots=True)
class Sampler:
    device: torch.device
    rows: int  # at most, at once
    _vocab: int = 0
    _scratch: tuple[Any, Any, Any] | None = None
    _least: Any = None
    _threshold_scratch: ThresholdScratch | None = None  # once something is cut

    def reserve(self, vocab: int) -> None:
        size = (self.rows, triton.cdiv(vocab, CHUNK))
        kinds = (torch.float32, torch.int32, torch.int64)
        self._vocab = vocab
        peaks, where, masses = (torch.zeros(size, dtype=kind, device=self.device) for kind in kinds)
        self._scratch = peaks, where, masses
        self._least = torch.zeros(self.rows, device=self.device)

    def sample(self, logits: Any, step: Fields, rows: SampleRows, last: Any, out: Any) -> PendingLogprobs | None:
        """Writes a token for each of the logits [S, vocab] to `out` [S] and for its slot to `last`. On the host, `rows`
        says the same as `step` on the device, without the padding."""
        assert self._scratch is not None
        asked = np.flatnonzero(rows.logprobs >= 0)
        edited = logits
        if any(rows.edits):
            edited = edit(logits.clone() if len(asked) else logits, rows.edits)
        peaks, where, masses = (array[: len(logits)] for array in self._scratch)
        draws = bool((rows.temperature > 0).any())
        find_chunk_maxima(edited, peaks, where)
        least = self._threshold(edited, peaks, step, rows) if draws else self._least
        sample_tokens(
            edited,
            step.temperature,
            least,
            step.seeds,
            step.target,
            step.sample_slots,
            last,
            out,
            (peaks, where, masses),
            draws=draws,
        )
        return self._logprobs(logits, out, asked, rows) if len(asked) else None

    def _threshold(self, logits: Any, peaks: Any, step: Fields, rows: SampleRows) -> Any:
        least = self._least[: len(logits)]
        if not ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)).any():
            return least.zero_()
        if self._threshold_scratch is None:
            self._threshold_scratch = ThresholdScratch.on(self.device, self.rows, self._vocab)
        sampling_threshold(
            logits, peaks, self._threshold_scratch, step.temperature, step.top_k, step.top_p, step.min_p, least
        )
        return least

    def _logprobs(self, logits: Any, tokens: Any, asked: Any, rows: SampleRows) -> PendingLogprobs:
        tops = rows.logprobs[asked].tolist()
        if len(asked) < len(logits):
            index = to_device(asked.astype(np.int64), self.device)
            logits, tokens = logits[index], tokens[index]
        norm = torch.logsumexp(logits, 1, keepdim=True)
        best, others = torch.topk(logits, max(tops), dim=1)
        own = tokens.long()[:, None]
        values = torch.cat([logits.gather(1, own), best], 1) - norm
        return PendingLogprobs(tops, to_host(values), to_host(torch.cat([own, others], 1)))


def edit(logits: Any, edits: Sequence[LogitEdit | None]) -> Any:
    """Applies every row's edits to [S, vocab], in place."""
    flat, vocab, device = logits.view(-1), logits.shape[1], logits.device
    kept = [(s * vocab, edit) for s, edit in enumerate(edits) if edit is not None]
    repeated = [(base, e) for base, e in kept if e.repetition != 1.0]
    if any(len(e.seen) for _, e in repeated):
        places = places_of([(base, e.seen) for base, e in repeated], device)
        factor = np.concatenate([np.full(len(e.seen), e.repetition, np.float32) for _, e in repeated])
        seen, by = flat[places], to_device(factor, device)
        flat[places] = torch.where(seen > 0, seen / by, seen * by)
    if any(len(e.add_ids) for _, e in kept):
        places = places_of([(base, e.add_ids) for base, e in kept], device)
        flat[places] += to_device(np.concatenate([e.add_values for _, e in kept]), device)
    if any(len(e.ban) for _, e in kept):
        flat.index_fill_(0, places_of([(base, e.ban) for base, e in kept], device), -torch.inf)
    masks = [(s, edit.allow) for s, edit in enumerate(edits) if edit is not None and edit.allow is not None]
    if masks:
        words = np.stack([mask.words() for _, mask in masks])  # worked out while the device computes the logits
        rows = np.array([s for s, _ in masks], np.int32)
        apply_bitmask(logits, to_device(rows, device), to_device(words, device))
    return logits


def places_of(rows: Sequence[tuple[int, Any]], device: torch.device) -> Any:
    return to_device(np.concatenate([tokens.astype(np.int64) + base for base, tokens in rows]), device)


def to_device(array: Any, device: torch.device) -> Any:
    """Without waiting for it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def to_host(tensor: Any) -> Any:
    """Without waiting: to be read after an event that comes later."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
