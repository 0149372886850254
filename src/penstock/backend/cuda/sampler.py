"""Turns logits into tokens and logprobs, on the device; see backend/sample.py for what that means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import triton

from penstock.backend.base import Bitmasks, Ints, LogitEdits, SampleRows
from penstock.backend.batches import greedy_rows
from penstock.backend.cuda.kernels.apply_bitmask import apply_bitmask
from penstock.backend.cuda.kernels.sample_tokens import CHUNK, find_chunk_maxima, sample_tokens
from penstock.backend.cuda.kernels.sampling_threshold import ThresholdScratch, sampling_threshold
from penstock.backend.cuda.kernels.token_logprobs import token_logprobs
from penstock.backend.cuda.step_layout import DeviceInputs
from penstock.types import TokenLogprob


class PendingLogprobs(NamedTuple):
    """Logprobs that are still on their way from the device."""

    tops: Sequence[int]  # how many alternatives each of the positions wants
    values: Any  # [n, 1 + most] logprobs of the token and of the most likely
    tokens: Any  # [n, 1 + most]

    def read(self) -> list[TokenLogprob]:
        entries = zip(self.tops, self.tokens.tolist(), self.values.tolist(), strict=True)
        return [
            TokenLogprob(tokens[0], values[0], tuple(zip(tokens[1 : top + 1], values[1 : top + 1], strict=True)))
            for top, tokens, values in entries
        ]


class PendingTokenLogprobs(NamedTuple):
    """Holds logprobs of only the tokens, without alternatives, that are still on their way from the device."""

    asked: Any  # [n] the positions that want one
    found: Any  # [S, 2] int32: tokens, and the bits of their logprobs

    def read(self) -> list[TokenLogprob]:
        found = self.found.numpy()[self.asked]
        values = found[:, 1].view(np.float32).tolist()
        return [TokenLogprob(token, value, ()) for token, value in zip(found[:, 0].tolist(), values, strict=True)]


Pending = PendingLogprobs | PendingTokenLogprobs


@dataclass(slots=True)
class DeviceSampler:
    device: torch.device
    rows: int  # at most, at once
    by_row: bool = False  # what torch sums up is summed up row by row: its order depends on the shape
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

    def sample(
        self, logits: Any, step: DeviceInputs, rows: SampleRows, last: Any, out: Any, masks: Bitmasks | None = None
    ) -> Pending | None:
        """Writes a token for each of the logits [S, vocab] to `out` [S] and for its slot to `last`. `rows` has the
        numbers of `step` on the host, without padding."""
        assert self._scratch is not None
        asked = np.flatnonzero(rows.logprobs >= 0)
        edited = logits
        if len(rows.edits.rows) or masks:
            edited = edit(logits.clone() if len(asked) else logits, rows.edits, masks)
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

    def copy_chained(self, logits: Any, rows: SampleRows) -> Any:
        """Queues the copy of the logits at positions that have a chain to the host: [n, vocab]. They are the model's
        own; the host edits them."""
        index = to_device(np.array([chain.row for chain in rows.chains], np.int64), self.device)
        return to_host(logits[index].float())

    def _threshold(self, logits: Any, peaks: Any, step: DeviceInputs, rows: SampleRows) -> Any:
        least = self._least[: len(logits)]
        if not ((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)).any():
            return least.zero_()
        if self._threshold_scratch is None:
            self._threshold_scratch = ThresholdScratch.on(self.device, self.rows, self._vocab)
        sampling_threshold(
            logits, peaks, self._threshold_scratch, step.temperature, step.top_k, step.top_p, step.min_p, least
        )
        return least

    def _logprobs(self, logits: Any, tokens: Any, asked: Any, rows: SampleRows) -> Pending:
        tops = rows.logprobs[asked].tolist()
        if not any(tops):
            found = torch.empty((len(rows.target), 2), dtype=torch.int32, device=self.device)
            token_logprobs(logits, tokens, found)
            return PendingTokenLogprobs(asked, to_host(found))
        if len(asked) < len(logits):
            index = to_device(asked.astype(np.int64), self.device)
            logits, tokens = logits[index], tokens[index]
        parts = logits.split(1 if self.by_row else len(logits))
        norm = torch.cat([torch.logsumexp(part, 1, keepdim=True) for part in parts])
        best, others = torch.topk(logits, max(tops), dim=1)
        own = tokens.long()[:, None].clamp(min=0)
        values = torch.cat([logits.gather(1, own), best], 1) - norm
        return PendingLogprobs(tops, to_host(values), to_host(torch.cat([own, others], 1)))


def edit(logits: Any, edits: LogitEdits, masks: Bitmasks | None) -> Any:
    flat, vocab, device = logits.view(-1), logits.shape[1], logits.device
    counts = np.diff(edits.seen_start)
    repeated = np.repeat(edits.repetition, counts)
    if (repeated != 1).any():
        places = to_device(places_of(edits.rows, edits.seen, counts, vocab)[repeated != 1], device)
        seen, by = flat[places], to_device(repeated[repeated != 1], device)
        flat[places] = torch.where(seen > 0, seen / by, seen * by)
    if len(edits.add_ids):
        places = to_device(places_of(edits.rows, edits.add_ids, np.diff(edits.add_start), vocab), device)
        flat[places] += to_device(edits.add_values, device)
    if len(edits.ban):
        places = to_device(places_of(edits.rows, edits.ban, np.diff(edits.ban_start), vocab), device)
        flat.index_fill_(0, places, -torch.inf)
    if masks:
        apply_bitmask(logits, to_device(masks.rows, device), to_device(masks.words, device))
    return logits


def places_of(rows: Ints, tokens: Ints, counts: Any, vocab: int) -> Any:
    """Returns where in the flat logits the tokens of each row lie; row r has counts[r] of them."""
    return np.repeat(rows.astype(np.int64) * vocab, counts) + tokens


def to_device(array: Any, device: torch.device) -> Any:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def to_host(tensor: Any) -> Any:
    """Copies a tensor to the host and does not wait for it: it may be read after an event that comes later."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def sampling_kinds(vocab: int) -> Iterator[tuple[SampleRows, Bitmasks | None]]:
    """Yields ways to sample one row: greedy, drawn from all, drawn from the likeliest, and restricted by a grammar."""
    greedy = greedy_rows(1)
    drawn = replace(greedy, temperature=np.ones(1, np.float32))
    for rows in (greedy, drawn, replace(drawn, top_p=np.full(1, 0.9, np.float32))):
        yield rows, None
    yield greedy, Bitmasks(np.zeros(1, np.int32), np.full((1, -(-vocab // 32)), -1, np.int32))
