"""Cells of `cuda.py` that look at one kernel at a time: is it right, how fast is it, which tiling is the fastest."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch

from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cuda import inputs
from penstock.backend.cuda.device_tilings import Tilings
from penstock.backend.cuda.devices import device_properties
from penstock.backend.cuda.graphs import padded
from penstock.backend.cuda.kernels import (
    decode_attention,
    gemv,
    norm,
    prefill_attention,
    rope,
    sample_tokens,
    sampling_threshold,
    silu_and_mul,
)
from penstock.backend.cuda.kernels.cublas import cublas_gemm
from penstock.backend.cuda.kernels.hopper_attention import HopperAttentionTiling
from penstock.backend.cuda.kernels.skinny_gemm import Tiling, skinny_gemm
from penstock.backend.cuda.kernels.split_k import SplitKScratch
from penstock.model.rope import plain

Figures = dict[str, Any]
Call = Callable[[], Any]
SHAPES = {  # rows, width, gated
    "qkv": (6144, 4096, False),
    "o": (4096, 4096, False),
    "gate_up": (28672, 4096, True),
    "down": (4096, 14336, False),
    "head": (128256, 4096, False),
}
BEYOND_L2 = 300e6
BEGAN = time.perf_counter()


def say(line: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:6.1f}] {line}", flush=True)


def seconds(call: Call, times: int = 5) -> float:
    """Of one call, on the current stream; the median of several."""
    spent = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        spent.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(spent)


def measure(calls: Sequence[Call]) -> float:
    """Seconds of one of the calls, run one after the other in a graph."""
    for call in calls[:2]:
        call()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        for call in calls:
            call()
        graph.capture_end()
        graph.replay()
        found = seconds(graph.replay) / len(calls)
    torch.cuda.synchronize()
    return found


def bf16(*size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_()


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def copies(rows: int, width: int) -> list[torch.Tensor]:
    """As many of a weight as the cache cannot hold."""
    return [bf16(rows, width) * 0.02 for _ in range(max(2, round(BEYOND_L2 / (2 * rows * width))))]


def product(x: torch.Tensor, weight: torch.Tensor, gated: bool) -> torch.Tensor:
    y = x.float() @ weight.float().t()
    left, right = y.chunk(2, dim=1)
    return torch.nn.functional.silu(left) * right if gated else y


def limits(_: Any) -> Figures:
    big = torch.empty(1 << 32, dtype=torch.uint8, device="cuda").random_()
    other = torch.empty_like(big)
    other.copy_(big)
    copy = 2 * big.numel() / seconds(lambda: other.copy_(big))
    read = big.numel() / seconds(lambda: big.view(torch.int64).sum())
    a, b = bf16(8192, 8192), bf16(8192, 8192)
    a @ b
    flops = 2 * 8192**3 / seconds(lambda: a @ b)
    say(f"copy {copy / 1e12:.2f} TB/s, read (sum) {read / 1e12:.2f} TB/s, bf16 product {flops / 1e12:.0f} TFLOP/s")
    return {"copy B/s": copy, "read B/s": read, "bf16 FLOP/s": flops}


def products(_: Any) -> Figures:
    """Every product of a layer, ours and the library's, at every number of rows."""
    found: Figures = {}
    scratch = SplitKScratch.on(torch.device("cuda"))
    totals: dict[str, float] = {}
    for name, (rows, width, gated) in SHAPES.items():
        weights = copies(rows, width)
        for count in (1, 2, 8, 16, 32, 64, 96, 128, 192, 256, 512, 2048):
            x = bf16(count, width)
            kind = torch.float32 if name == "head" else torch.bfloat16
            out = torch.empty((count, rows // 2 if gated else rows), dtype=kind, device="cuda")
            full = torch.empty((count, rows), dtype=kind, device="cuda")
            entry = {"library us": measure([partial(library, x, w, full, out, gated) for w in weights]) * 1e6}
            ours = our_product(x, out, rows, width, gated, scratch)
            if ours:
                out.fill_(torch.nan)
                ours(weights[0])
                entry["error"] = error(out, product(x, weights[0], gated))
                entry["ours us"] = measure([partial(ours, w) for w in weights]) * 1e6
                entry["ours GB/s"] = 2 * rows * width / entry["ours us"] / 1e3
            times = 1 if name == "head" else 32
            for kind_of in ("library us", "ours us"):
                value = entry.get(kind_of, entry["library us"])
                key = f"{count} rows, {kind_of[:-3]} ms"
                totals[key] = totals.get(key, 0.0) + times * value / 1e3
            found[f"{name} x {count}"] = entry
            say(f"{name:8s} {count:5d}: " + ", ".join(f"{k} {v:.4g}" for k, v in entry.items()))
        del weights
    for key, value in totals.items():
        say(f"all products of a step, {key}: {value:.3f}")
    return {**found, "totals": totals}


def library(x: Any, weight: Any, full: Any, out: Any, gated: bool) -> None:
    cublas_gemm(x, weight, None, full)
    if gated:
        silu_and_mul.act_and_mul(full, out)


def our_product(
    x: Any, out: Any, rows: int, width: int, gated: bool, scratch: SplitKScratch
) -> Callable[[torch.Tensor], None] | None:
    tilings = Tilings(device_properties(x.device))
    if len(x) == 1:
        return lambda w: gemv.gemv(x, w, None, out, gated=gated, tiling=tilings.gemv(rows, width))
    tiling = tilings.skinny(len(x), rows, width, x.element_size(), gated)
    return tiling and (lambda w: skinny_gemm(x, w, None, out, tiling, scratch, gated=gated))


ROW_TILINGS = [
    (1, 1024, 2), (1, 1024, 4), (1, 2048, 4), (1, 4096, 4), (1, 4096, 8), (2, 512, 2), (2, 1024, 4), (2, 2048, 4),
    (2, 2048, 8), (2, 4096, 8), (4, 512, 4), (4, 1024, 4), (4, 1024, 8), (4, 2048, 8), (8, 512, 4), (8, 512, 8),
]  # fmt: skip
TILINGS = [(64, 64, 4, 4), (64, 64, 4, 6), (64, 128, 4, 3), (64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 8, 3)]
TUNED_COUNTS = (16, 64)


def tune(_: Any) -> Figures:
    """The fastest tilings of the products for a few rows."""
    found: Figures = {}
    scratch = SplitKScratch.on(torch.device("cuda"))
    for name, (rows, width, gated) in SHAPES.items():
        weights = copies(rows, width)
        half = rows // 2 if gated else rows
        kind = torch.float32 if name == "head" else torch.bfloat16
        x, out = bf16(1, width), torch.empty((1, half), dtype=kind, device="cuda")
        trials = {
            str(t): [partial(gemv.gemv, x, w, None, out, gated=gated, tiling=gemv.Tiling(*t)) for w in weights]
            for t in ROW_TILINGS
        }
        found[f"{name} x 1"] = fastest(f"{name} x 1", trials, 2 * rows * width)
        for count in TUNED_COUNTS if name != "head" else ():
            xs, outs = bf16(count, width), torch.empty((count, half), dtype=kind, device="cuda")
            tried = [
                Tiling(r, w, split, warps, stages)
                for r, w, warps, stages in TILINGS
                for split in splits(half, width, r)
                if fits(r, w, stages, count, gated)
            ]
            trials = {
                str(tuple(t)): [partial(skinny_gemm, xs, w, None, outs, t, scratch, gated=gated) for w in weights]
                for t in tried
            }
            label = f"{name} x {count}"
            found[label] = fastest(label, trials, 2 * rows * width)
        del weights
    return found


def splits(rows: int, width: int, tile: int) -> list[int]:
    tiles = -(-rows // tile)
    return [s for s in (1, 2, 4, 8) if (s == 1 and tiles >= 128) or (120 <= tiles * s <= 600 and width // s >= 512)]


def fits(rows: int, width: int, stages: int, count: int, gated: bool) -> bool:
    return stages * width * 2 * (rows * (2 if gated else 1) + max(count, 16)) <= 225_000


def fastest(label: str, trials: dict[str, list[Call]], moved: float, best: int = 4, threads: int = 14) -> Figures:
    """Compiles several of them at once, then times each."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda calls: attempt(calls[0]), trials.values()))
    torch.cuda.synchronize()
    times = {name: attempt(partial(measure, calls)) for name, calls in trials.items()}
    ranked = sorted((spent, name) for name, spent in times.items() if isinstance(spent, float))
    failed = sum(not isinstance(spent, float) for spent in times.values())
    say(
        f"{label} ({failed} failed): "
        + "; ".join(f"{n} {s * 1e6:.1f} us {moved / s / 1e9:.0f} GB/s" for s, n in ranked[:best])
    )
    if not ranked:
        say(f"  all failed, for example: {next(iter(times.values()), None)}")
    return {name: spent * 1e6 if isinstance(spent, float) else str(spent) for name, spent in times.items()}


def attempt(call: Call) -> Any:
    try:
        return call()
    except Exception:
        text = traceback.format_exc()
        say(f"  failed: {text[-300:]}")
        return text[-2000:]


class Context:
    """Rows of single tokens, or runs of them, over a random cache."""

    def __init__(self, chunks: list[tuple[int, int]], heads: int = 32, kv_heads: int = 8, dims: int = 128) -> None:
        widths = [-(-(start + count) // 16) for count, start in chunks]
        blocks = np.random.default_rng(0).permutation(sum(widths))
        tables = np.split(blocks, np.cumsum(widths)[:-1])
        batch = greedy_batch(
            [Chunk([1] * count, start, table.tolist()) for (count, start), table in zip(chunks, tables, strict=True)]
        )
        self.batch = batch
        self.dims = dims
        self.group = heads // kv_heads
        self.tilings = Tilings(device_properties(torch.device("cuda", 0)))
        spare = inputs.spare_splits(kv_heads)
        pad = partial(padded, spare=spare)
        self.work = inputs.plan_attention(batch, 128 // (heads // kv_heads), pad, spare=spare)
        self.caches = [bf16(sum(widths), 2, kv_heads, 16, dims) for _ in range(max(2, min(40, 40_000 // sum(widths))))]
        self.qkv = bf16(len(batch.tokens), (heads + 2 * kv_heads) * dims)
        self.out = torch.empty((len(batch.tokens), heads * dims), dtype=torch.bfloat16, device="cuda")
        splits = np.full((max(self.work.shape.splits, 1), 8), -1, np.int32)
        splits[: len(self.work.splits)] = self.work.splits
        self.splits, self.tiles = on_device(splits), on_device(self.work.tiles)
        self.tables, self.header = on_device(batch.tables.ravel()), on_device(np.array([batch.tables.shape[2]] * 4))
        self.shares = decode_attention.SplitKV(
            torch.empty(len(splits) * heads * dims, device="cuda"),
            torch.empty(len(splits) * heads * 2, device="cuda"),
            torch.zeros(len(chunks) * kv_heads, dtype=torch.int32, device="cuda"),
        )

    def decode(self, cache: torch.Tensor, tiling: tuple[int, int, int] | None = None) -> None:
        tiling = tiling or self.tilings.decode_attention(len(self.splits), self.dims, self.qkv.element_size())
        inputs = self.qkv, cache, self.splits, self.tables, self.header, self.out, self.shares
        decode_attention.decode_attention(*inputs, None, self.dims**-0.5, 0, tiling=tiling)

    def prefill(
        self,
        cache: torch.Tensor,
        tiling: tuple[int, int, int] | None = None,
        hopper: HopperAttentionTiling | None = None,
        tiles: torch.Tensor | None = None,
    ) -> None:
        queries = prefill_attention.queries_per_tile(self.group)
        tiling = tiling or self.tilings.prefill_attention(queries, self.dims, self.qkv.element_size())
        tiles = self.tiles if tiles is None else tiles
        inputs = self.qkv, cache, tiles, self.tables, self.header, self.out
        prefill_attention.prefill_attention(*inputs, self.dims**-0.5, 0, tiling=tiling, hopper=hopper)

    def error(self) -> float:
        """Of what was last computed over the first cache, on the last row."""
        row = len(self.batch.slots) - 1
        first, last = self.batch.row_start[row : row + 2].tolist()
        positions = torch.from_numpy(self.batch.positions[first:last]).cuda()
        context = int(positions[-1]) + 1
        table = torch.from_numpy(self.batch.tables[0, row, : -(-context // 16)].astype(np.int64)).cuda()
        keys, values = self.caches[0][table].float().permute(1, 2, 0, 3, 4).reshape(2, 8, -1, self.dims)[:, :, :context]
        q = self.qkv[first:last].float().reshape(last - first, -1, self.dims)[:, :32].transpose(0, 1)
        mask = torch.arange(context, device="cuda")[None, :] <= positions[:, None]
        keys, values = (x.repeat_interleave(4, 0) for x in (keys, values))
        wanted = torch.nn.functional.scaled_dot_product_attention(q[None], keys[None], values[None], mask)[0]
        return error(self.out[first:last], wanted.transpose(0, 1).reshape(last - first, -1))


def on_device(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, np.int32)).cuda()


# Rows and the mean of their lengths, which differ: rows of one length alone flatter settings that are bad for others.
DECODES = {"1 x 768": (1, 768), "1 x 8192": (1, 8192), "64 x 768": (64, 768), "256 x 768": (256, 768)}


PREFILLS = {
    "4 x 512": [(512, 0)] * 4,
    "4096": [(4096, 0)],
    "16000": [(16000, 0)],
    "512 after 3584": [(512, 3584)],
    "8192 after 24000": [(8192, 24000)],
}


def attention(_: Any) -> Figures:
    """Both kernels, with the settings they have and some others."""
    found: Figures = {}
    for name, (rows, length) in DECODES.items():
        lengths = np.linspace(length * 2 / 3, length * 4 / 3, rows).astype(int) if rows > 1 else np.array([length])
        context = Context([(1, int(each) - 1) for each in lengths])
        context.decode(context.caches[0])
        moved = int(lengths.sum()) * 8 * 128 * 2 * 2
        say(f"decode attention {name}: error {context.error():.2e}, {len(context.work.splits)} splits")
        trials = {}
        for tile, warps, stages in (
            (64, 4, 3),
            (32, 2, 4),
            (32, 4, 4),
            (64, 4, 2),
            (64, 2, 2),
            (64, 2, 3),
            (128, 4, 3),
            (128, 8, 3),
        ):
            name_of = f"tile {tile} warps {warps} stages {stages}"
            trials[name_of] = [partial(context.decode, cache, (tile, warps, stages)) for cache in context.caches]
        found[f"decode {name}"] = fastest(f"decode {name}", trials, moved, best=7, threads=1)
    for name, chunks in PREFILLS.items():
        context = Context(chunks)
        hopper = context.tilings.hopper_attention(context.dims)
        context.prefill(context.caches[0], hopper=hopper)
        say(f"prefill attention {name}: error {context.error():.2e}, {len(context.tiles)} tiles")
        flops = sum(4 * 32 * 128 * (count * start + count * (count + 1) / 2) for count, start in chunks)
        trials = {}
        for tile, warps, stages in ((64, 8, 3), (64, 8, 2), (128, 8, 2), (64, 4, 2), (32, 4, 3), (32, 8, 4)):
            name_of = f"tile {tile} warps {warps} stages {stages}"
            trials[name_of] = [partial(context.prefill, cache, (tile, warps, stages)) for cache in context.caches[:8]]
        if hopper:
            trials["hopper"] = [partial(context.prefill, cache, hopper=hopper) for cache in context.caches[:8]]
            how = {"hopper": hopper, "tiles": context.tiles.flip(0)}
            trials["hopper, shortest first"] = [partial(context.prefill, cache, **how) for cache in context.caches[:8]]
        found[f"prefill {name}"] = times = fastest(f"prefill {name}", trials, flops, best=6, threads=1)
        good = [t for t in times.values() if isinstance(t, float)]
        say(f"prefill {name}: best {flops / min(good) / 1e6:.0f} TFLOP/s" if good else "none ran")
    return found


def small(_: Any) -> Figures:
    """The kernels between the products, and sampling."""
    found: Figures = {}
    for rows in (1, 64, 256, 2048):
        x, residual, out, total = (bf16(rows, 4096) for _ in range(4))
        gain = torch.ones(4096, device="cuda")
        norm.add_norm(x, residual, gain, 1e-5, out, total)
        y = x.double() + residual.double()
        wrong = error(out, y / (y.square().mean(1, keepdim=True) + 1e-5).sqrt())
        found[f"norm {rows}"] = report(
            f"norm {rows}", wrong, partial(norm.add_norm, x, residual, gain, 1e-5, out, total), rows * 4096 * 8
        )
        wide, half = bf16(rows, 28672), bf16(rows, 14336)
        silu_and_mul.act_and_mul(wide, half)
        left, right = wide.double().chunk(2, dim=1)
        wrong = error(half, torch.nn.functional.silu(left) * right)
        found[f"gate {rows}"] = report(f"gate {rows}", wrong, partial(silu_and_mul.gate, wide, half), rows * 14336 * 6)
        qkv, cache = bf16(rows, 6144), bf16(rows // 16 + 1, 2, 8, 16, 128)
        angles = torch.tensor(plain(500000.0, 128), dtype=torch.float64, device="cuda")
        at = torch.arange(rows, dtype=torch.int32, device="cuda")
        call = partial(rope.rope_and_store, qkv, angles, 1.0, False, at, at, cache)
        found[f"rope {rows}"] = report(f"rope {rows}", 0.0, call, rows * 6144 * 4)
    for rows in (1, 64, 256):
        found[f"sampling {rows}"] = sampling(rows)
    return found


def report(name: str, wrong: float, call: Call, moved: float) -> Figures:
    spent = measure([call] * 20)
    say(f"{name}: error {wrong:.2e}, {spent * 1e6:.2f} us, {moved / spent / 1e9:.0f} GB/s")
    return {"error": wrong, "us": spent * 1e6, "GB/s": moved / spent / 1e9}


def sampling(rows: int) -> Figures:
    logits = torch.empty((rows, 128256), device="cuda").normal_(0, 3)
    room = sampling_threshold.ThresholdScratch.on(logits.device, rows, 128256)
    chunks = -(-128256 // sample_tokens.CHUNK)
    sized = lambda kind: torch.zeros((rows, chunks), dtype=kind, device="cuda")  # noqa: E731
    peaks, where, masses = sized(torch.float32), sized(torch.int32), sized(torch.int64)
    ones = lambda value, kind=torch.float32: torch.full((rows,), value, dtype=kind, device="cuda")  # noqa: E731
    whole = torch.int32
    seeds = torch.randint(-(2**31), 2**31, (rows, 2), device="cuda").int()
    slots = torch.arange(rows, dtype=whole, device="cuda")
    last, out, least = ones(0, whole), ones(0, whole), ones(0.0)

    def run(heat: Any, draws: bool, cuts: bool) -> None:
        sample_tokens.find_chunk_maxima(logits, peaks, where)
        if cuts:
            sampling_threshold.sampling_threshold(logits, peaks, room, heat, ones_k, ones_p, zero_p, least)
        sample_tokens.sample_tokens(
            logits, heat, least, seeds, target, slots, last, out, (peaks, where, masses), draws=draws
        )

    target, ones_k, ones_p, zero_p = ones(-1, whole), ones(40, whole), ones(0.9), ones(0.0)
    cold, hot = ones(0.0), ones(0.8)
    run(cold, False, False)
    right = bool((out == logits.argmax(1)).all())
    found = {
        "greedy is the highest": right,
        "greedy us": measure([lambda: run(cold, False, False)] * 5) * 1e6,
        "temperature us": measure([lambda: run(hot, True, False)] * 5) * 1e6,
        "top-k and top-p us": measure([lambda: run(hot, True, True)] * 3) * 1e6,
    }
    say(f"sampling {rows}: {found}")
    return found


def together(*cells: Callable[[Any], Figures]) -> Callable[[Any], Figures]:
    def cell(bench: Any) -> Figures:
        return {one.__name__: attempt(partial(one, bench)) for one in cells}

    return cell


def names(cells: Iterable[Callable[[Any], Figures]]) -> dict[str, Callable[[Any], Figures]]:
    return {cell.__name__: cell for cell in cells}


KERNEL_CELLS = {
    "kernels": together(limits, small, attention, products),
    **names([limits, small, attention, products, tune]),
}
