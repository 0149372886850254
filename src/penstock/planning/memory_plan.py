"""What will be held in memory, decided before anything is loaded: a shortage shrinks the cache, or is an error now."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.backend.base import Footprint
from penstock.config import Config, resolve
from penstock.errors import ConfigError
from penstock.model.spec import ModelSpec
from penstock.types import Limits

ADVICE = "--quantize fp8 or int4 makes plain weights smaller, lower --step-tokens and --max-rows the workspace"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    footprint: Footprint
    limits: Limits
    notes: tuple[str, ...] = ()  # what is less than was asked for

    @property
    def cache(self) -> int:
        return self.limits.num_blocks * self.limits.block_size * self.footprint.kv_token

    @property
    def states(self) -> int:
        """Of sequences that run, and saved ones."""
        return all_states(self.limits) * self.footprint.state

    @property
    def whole_sequences(self) -> int:
        """That fit with all the tokens they may have."""
        return self.limits.num_blocks // -(-self.limits.max_len // self.limits.block_size)

    def lines(self) -> Iterator[str]:
        """A table for people."""
        has, limits = self.footprint, self.limits
        tokens = limits.num_blocks * limits.block_size
        yield f"memory of {has.device}: {gigabytes(has.free)} free of {gigabytes(has.total)}"
        for name, size, remark in (
            ("weights", has.weights, ""),
            ("workspace", has.workspace, f"steps of {limits.step_tokens} tokens, {limits.max_rows} rows"),
            ("reserve", has.reserve, ""),
            (
                "KV cache",
                self.cache,
                f"{tokens:,} tokens of {has.kv_token / 1e3:.1f} kB: {self.whole_sequences} x {limits.max_len:,}",
            ),
            (
                "states",
                self.states,
                f"{limits.max_rows} rows and {limits.states} saved, of {has.state / 1e6:.1f} MB",
            ),
            ("left over", has.free - has.weights - has.workspace - has.reserve - self.cache - self.states, ""),
        ):
            if size or name != "states":
                yield f"  {name:<18}{gigabytes(size):>10}  {remark}".rstrip()
        yield from (f"  note: {note}" for note in self.notes)


def plan_memory(config: Config, spec: ModelSpec, has: Footprint) -> MemoryPlan:
    """For a settled config. Raises ConfigError where not even a small cache would fit beside the weights."""
    room = has.free - has.weights - has.workspace - has.reserve
    if room < 2 * config.block_size * has.kv_token:
        raise ConfigError(
            f"the model needs {gigabytes(has.weights)} for weights, {gigabytes(has.workspace)} for workspace and "
            f"{gigabytes(has.reserve)} in reserve, beside its KV cache; {has.device} has {gigabytes(has.free)} free "
            f"of {gigabytes(has.total)}: {ADVICE}"
        )
    notes = []
    if config.kv_memory > room:
        notes.append(f"the KV cache gets {gigabytes(room)}, not the {gigabytes(config.kv_memory)} asked for")
        config = replace(config, kv_memory=0)
    limits = resolve(
        config,
        context=spec.max_len,
        vocab=spec.vocab,
        kv_bytes=has.kv_token,
        memory=room,
        encoder=spec.encoder,
        state_bytes=has.state,
    )
    if limits.max_rows < config.max_rows:
        notes.append(f"{limits.max_rows} rows in a step, not {config.max_rows}: their states take half of the memory")
    wanted = config.max_len or spec.max_len
    if limits.max_len < wanted:
        short = "a step" if limits.max_len == limits.step_tokens and spec.encoder else "the cache"
        notes.append(f"prompt and answer have {limits.max_len} tokens at most, not {wanted}: {short} holds no more")
    return MemoryPlan(has, limits, tuple(notes))


def all_states(limits: Limits) -> int:
    return limits.max_rows + limits.states if limits.states else 0


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
