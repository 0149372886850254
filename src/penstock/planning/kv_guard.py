"""Measures the loss of a quantized KV cache at load: the KL divergence of predictions with it and with 16 bits, on a
text in the package. `penstock eval kl` without --text measures the same windows. Results are kept next to the model's
packed weights:

<home>/packed/<model>/<options>.kv_loss
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np

from penstock import __version__
from penstock.backend.base import Backend, Batch, CacheSize, Ints, Model
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.devices import device_kind
from penstock.backend.packed_cache import identity
from penstock.config import AUTO, Config, packed_folder
from penstock.config.values import ANY, is_kv_quantized
from penstock.errors import ConfigError, InvalidRequest, KvLossTooLarge, ModelError
from penstock.model.load import Checkpoint
from penstock.planning.evaluation import (
    CONTEXT,
    GUARD_TOKENS,
    Comparison,
    built_in_text,
    compare,
    followers,
    summary,
    windows_in,
)

MEASURE = 2  # a change to the text or the computation needs another number
SUFFIX = ".kv_loss"


class KvLoss(NamedTuple):
    """Says how far predictions with a quantized KV cache are from those with one of 16 bits."""

    mean: float  # KL divergence of a prediction, in nats
    error: float  # standard error
    same_top: float  # share of predictions whose most likely token is the same

    def __str__(self) -> str:
        return f"mean KL {self.mean:.5f} ± {self.error:.5f} nats, same top token {self.same_top:.1%}"


def check_kv(
    config: Config, checkpoint: Checkpoint, model: Model, backend: Backend, log: Callable[[str], None]
) -> None:
    """Logs the loss of a config's KV cache, measured now unless it is known, and raises KvLossTooLarge if it is beyond
    the config's bound. Only a quantized cache of a model that generates is measured. The config's defaults are
    resolved, and `model` is loaded as program 0."""
    if not is_measured(config, checkpoint):
        return
    loss = kept_loss(config, checkpoint)
    if loss is None:
        try:
            windows = guard_windows(checkpoint)
        except ModelError as error:  # it is served to those who send token ids
            log(f"KV cache in {config.kv}: what it costs is not known, because there is no tokenizer: {error}")
            return
        except InvalidRequest as error:  # a tokenizer that knows hardly any of the text
            log(f"KV cache in {config.kv}: what it costs is not known: {error}")
            return
        loss = measure(config, checkpoint, model, backend, windows)
        keep(config, checkpoint, loss)
    log(f"KV cache in {config.kv}, compared with 16 bits: {loss}")
    if config.kv_loss != ANY and not loss.mean <= float(config.kv_loss):
        raise KvLossTooLarge(
            f"a KV cache in {config.kv} changes the predictions of this model too much: {loss}, and the bound is "
            f"{config.kv_loss}: leave out --kv, or allow it with a larger --kv-loss or --kv-loss {ANY}"
        )


def is_measured(config: Config, checkpoint: Checkpoint) -> bool:
    spec = checkpoint.spec
    return is_kv_quantized(config.kv) and spec.generates and not spec.encoder and bool(spec.cached_attention)


def guard_windows(checkpoint: Checkpoint) -> list[Ints]:
    return windows_in(checkpoint, built_in_text(), min(CONTEXT, checkpoint.spec.max_len), GUARD_TOKENS)


def measure(config: Config, checkpoint: Checkpoint, model: Model, backend: Backend, windows: Sequence[Ints]) -> KvLoss:
    found = [compare_window(config, checkpoint, model, backend, window) for window in windows]
    whole = summary(Comparison(*(np.concatenate(column) for column in zip(*found, strict=True))))
    return KvLoss(whole.mean, whole.error, whole.same_top)


def compare_window(config: Config, checkpoint: Checkpoint, model: Model, backend: Backend, window: Ints) -> Comparison:
    blocks = -(-len(window) // config.block_size)
    size = CacheSize(blocks, config.block_size, 1 if checkpoint.spec.recurrent else 0)
    batches = list(batches_of(window, config.step_tokens, blocks))
    truth, answer = (backend.trial_logits(model, kv, batches, size) for kv in (AUTO, config.kv))
    assert truth is not None, "a backend with one type of cache refuses all others"
    assert answer is not None
    return compare(truth, answer, followers(window))


def batches_of(window: Ints, step_tokens: int, blocks: int) -> Iterator[Batch]:
    """Yields the steps that compute a window; the positions of its second half are sampled."""
    tokens, half = window[:-1].tolist(), len(window) // 2
    for step, start in enumerate(range(0, len(tokens), step_tokens)):
        end = min(start + step_tokens, len(tokens))
        wanted = max(end - max(start, half), 0)
        yield greedy_batch([Chunk(tokens[start:end], start, range(blocks), sample=wanted)], step)


def kept_loss(config: Config, checkpoint: Checkpoint) -> KvLoss | None:
    """Returns the loss that was measured earlier with the same files on the same kind of device, if any. The config's
    defaults are resolved."""
    if not is_measured(config, checkpoint):
        return None
    try:
        key, values = json.loads(kept_path(config, checkpoint).read_text("utf-8"))
        return KvLoss(*values) if key == kept_key(config, checkpoint) else None
    except (OSError, ConfigError, ValueError, TypeError):
        return None


def keep(config: Config, checkpoint: Checkpoint, loss: KvLoss) -> None:
    with suppress(OSError, ConfigError):
        path = kept_path(config, checkpoint)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps([kept_key(config, checkpoint), loss]), "utf-8")
        part.replace(path)


def kept_path(config: Config, checkpoint: Checkpoint) -> Path:
    options = json.dumps([config.kv, device_kind(config.device).name, config.quantize, *config.config])
    name = blake2b(options.encode(), digest_size=8).hexdigest()
    return packed_folder(checkpoint.path) / f"{name}{SUFFIX}"


def kept_key(config: Config, checkpoint: Checkpoint) -> str:
    return json.dumps([MEASURE, __version__, checkpoint.spec.max_len, [identity(file) for file in checkpoint.files]])
