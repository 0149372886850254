"""Explains why requests fail, and why an engine must end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from penstock.backend.base import Ints
from penstock.core import Sequence
from penstock.engine.request_record import RequestRecord
from penstock.engine.samplers.sampler import wanted_positions
from penstock.errors import DeviceLost, InvalidGrammar, InvalidRequest, NotFinite, StepFailed
from penstock.types import BANNED, Failed, Row, StepPlan


def step_failure(error: Exception) -> tuple[str, str]:
    message = f"the step that computed this request failed: {type(error).__name__}: {error}"
    return error.code if isinstance(error, StepFailed) else StepFailed.code, message


def without_answer(
    plan: StepPlan,
    indices: Iterable[int],
    sequences: Mapping[int, Sequence],
    records: Mapping[int, RequestRecord],
    vocab: int,
) -> tuple[list[Failed], bool]:
    """Returns the ends of the requests for whose rows no token could be chosen, and whether the model may be why."""
    rows = [plan.rows[index] for index in indices]
    failed = {
        row.seq: _no_token(records[row.seq], sequences[row.seq].tokens, row, vocab)
        for row in rows
        if row.seq in records
    }
    ended = any(row.seq not in records for row in rows)
    return list(failed.values()), ended or any(each.code == NotFinite.code for each in failed.values())


def _no_token(record: RequestRecord, tokens: list[int], row: Row, vocab: int) -> Failed:
    """Returns the end of a request for whose row no token could be chosen: the request itself has ruled all of them
    out, or the model is broken."""
    id = record.request.id
    if _fewest_left(record, tokens, row, vocab) > 0:
        message = f"request {id}: the model computed NaN or infinity instead of logits; check its weights"
        return Failed(id, NotFinite.code, message)
    rules = _rules(record, row.start + row.count - len(record.request.prompt))
    only_grammar = record.constraint is not None and len(rules) == 1
    return Failed(id, (InvalidGrammar if only_grammar else InvalidRequest).code, _exclusion(record, rules, row))


def _fewest_left(record: RequestRecord, tokens: list[int], row: Row, vocab: int) -> int:
    """Returns how many tokens the request itself leaves at the position of its row where it leaves the fewest. A row
    that samples nothing, such as a piece of a prompt, has all of them."""
    sampler = record.sampler
    positions = [each for each in wanted_positions(sampler, tokens, row) if each.target < 0]
    if not positions:
        return vocab
    masks: list[Ints] | list[None] = sampler.bitmasks(row.draft) if sampler.constrained else [None] * len(positions)
    counts = [vocab]
    for (own, known, at, _), mask in zip(positions, masks, strict=True):
        bits = np.ones(vocab, np.uint8)
        if mask is not None:
            bits = np.unpackbits(mask.view(np.uint8), count=vocab, bitorder="little")
        if (edit := own.edit(known, at)) is not None:
            bits[edit.ban] = 0
            bits[edit.add_ids[edit.add_values == BANNED]] = 0
        counts.append(int(bits.sum()))
    return min(counts)


def _rules(record: RequestRecord, answered: int) -> list[str]:
    request, sampling = record.request, record.request.sampling
    grammar = (sampling.grammar.param if sampling.grammar is not None else "") or "the grammar"
    given = {
        grammar: record.constraint is not None,
        "allowed_token_ids": sampling.allowed_token_ids is not None,
        "logit_bias": BANNED in sampling.logit_bias.values(),
        "bad_words": request.bad_words,
        "min_tokens": answered < sampling.min_tokens,
    }
    return [name for name, used in given.items() if used]


def _exclusion(record: RequestRecord, rules: list[str], row: Row) -> str:
    answered = row.start + row.count - len(record.request.prompt)
    reason = record.constraint.problem if record.constraint is not None else ""
    told = f" ({reason})" if reason else ""
    fields = " and ".join(rules)
    return (
        f"after {answered} tokens of the answer {fields} of this request exclude every token{told}: relax one of them"
    )


def lost_device(error: Exception) -> DeviceLost:
    return DeviceLost(f"the device computes nothing any more after {type(error).__name__}: {error}")
