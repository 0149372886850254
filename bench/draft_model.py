"""Measures what a draft model gains: one stream of greedy answers, with it and without any speculation, alternately.

    python bench/draft_model.py tinyllama.gguf --llama2c stories15M.bin
    python bench/draft_model.py target.gguf --draft draft.gguf --quantize q8_0 --tokens 128

`--llama2c` takes a model in llama2.c's layout that has the target's vocabulary, and writes it as a GGUF file beside it
first. All answers must be the same. Ratios are of the seconds of one prompt's answer, without over with.
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock import LLM, SamplingParams
from penstock.model.gguf.reader import read_gguf
from penstock.model.gguf.writer import PendingTensor, encoded, write_gguf
from penstock.model.tensor import FORMATS

PROMPTS = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she",
    "Once upon a time, in a small house near the forest, there lived a big brown dog named Max. Max liked to",
    "Tom and his mom went to the store. Tom saw a red toy car and he wanted it very much. He said,",
    "One day, a little bird fell out of its nest. The bird was scared and cold. A kind cat saw the bird and",
    "There was a boy named Tim who had a shiny blue ball. He took it to the park every day. One sunny day,",
    "Sara and Ben were playing with blocks on the floor. They wanted to build a tall tower. Sara said,",
)


def main() -> None:
    options = parse()
    draft = options.draft or str(from_llama2c(Path(options.llama2c), Path(options.model)))
    engine: dict[str, Any] = {"threads": options.threads, "max_len": options.max_len, "max_rows": 4}
    plain = LLM(options.model, speculation="off", **engine)
    drafting = LLM(options.model, draft=draft, quantize=options.quantize, **engine)
    params = SamplingParams(temperature=options.temperature, seed=1, max_tokens=options.tokens, ignore_eos=True)
    ratios, differ = [], 0
    for round in range(options.rounds):
        for prompt in PROMPTS:
            before, without = timed(plain, prompt, params)
            after, with_drafts = timed(drafting, prompt, params)
            differ += without != with_drafts
            if round:  # the first one learns what steps cost and what is accepted
                ratios.append(before / after)
                print(f"{len(with_drafts)} tokens in {before:.2f} s, drafted in {after:.2f} s: {before / after:.2f}x")
    print(f"median {median(ratios):.2f}x of {len(ratios)}, from {min(ratios):.2f}x to {max(ratios):.2f}x; "
          f"{differ} answers differ")  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft", default="")
    parser.add_argument("--llama2c", default="")
    parser.add_argument("--quantize", default="q8_0", help="what plain weights of the draft model become")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--max-len", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=0)
    return parser.parse_args()


def timed(llm: LLM, prompt: str, params: SamplingParams) -> tuple[float, list[int]]:
    """Returns the seconds and the tokens of an answer."""
    began = perf_counter()
    [output] = llm.generate(prompt, params, use_tqdm=False)
    return perf_counter() - began, list(output.outputs[0].token_ids)


# -- llama2.c ------------------------------------------------------------------------------------------------------


def from_llama2c(path: Path, target: Path) -> Path:
    """Writes a model in llama2.c's layout as a GGUF file, with the tokenizer of `target`; returns its path."""
    out = path.with_suffix(".gguf")
    dim, hidden, layers, heads, kv_heads, vocab, context = struct.unpack("7i", path.read_bytes()[:28])
    values = np.fromfile(path, "<f4", offset=28)
    keys: dict[str, Any] = {
        "general.architecture": "llama",
        "general.name": path.stem,
        "llama.context_length": context,
        "llama.embedding_length": dim,
        "llama.block_count": layers,
        "llama.feed_forward_length": hidden,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": dim // heads,
    }
    for key, value in read_gguf(target).metadata.items():
        if key.startswith("tokenizer."):
            keys[key] = value.tolist() if isinstance(value, np.ndarray) else value
    tensors = list(llama2c_tensors(values, dim, hidden, layers, dim // heads * kv_heads, abs(vocab), vocab > 0))
    write_gguf(out, {key: encoded(value) for key, value in keys.items()}, tensors, lambda *_: None)
    return out


def llama2c_tensors(
    values: NDArray[np.float32], dim: int, hidden: int, layers: int, kv: int, vocab: int, tied: bool
) -> Iterator[PendingTensor]:
    """Yields the tensors in the order that they are stored in. A kind of layer tensor is stored for all layers before
    the next; after the last norm come RoPE's tables."""
    at = 0

    def take(name: str, *shape: int) -> PendingTensor:
        nonlocal at
        part = values[at : at + prod(shape)]
        at += len(part)
        return PendingTensor(name, FORMATS["F32"], shape, lambda: iter([part.view(np.uint8)]))

    yield take("token_embd.weight", vocab, dim)
    for name, shape in (
        ("attn_norm", (dim,)),
        ("attn_q", (dim, dim)),
        ("attn_k", (kv, dim)),
        ("attn_v", (kv, dim)),
        ("attn_output", (dim, dim)),
        ("ffn_norm", (dim,)),
        ("ffn_gate", (hidden, dim)),
        ("ffn_down", (dim, hidden)),
        ("ffn_up", (hidden, dim)),
    ):
        for layer in range(layers):
            yield take(f"blk.{layer}.{name}.weight", *shape)
    yield take("output_norm.weight", dim)
    if not tied:
        raise SystemExit("this file has an output matrix of its own, which is not read")


if __name__ == "__main__":
    main()
