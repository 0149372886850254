"""Measures what a draft model or head gains: one stream of answers with it, with copied drafts only, and with none, in
turn.

    python bench/draft_model.py tinyllama.gguf --llama2c stories15M.bin
    python bench/draft_model.py target.gguf --draft draft.gguf --quantize q8_0 --tokens 128
    python bench/draft_model.py smollm2 --draft HEAD --questions questions.jsonl --every 8

It answers stories, or every so many of the questions in a file of lines like {"turns": ["..."]}.
`--llama2c` takes a model in llama2.c's layout that has the target's vocabulary, and writes it as a GGUF file beside it
first. All answers must be the same. Ratios are of the processor time of one prompt's answer, without drafts over with:
with one thread that is what a quiet machine would take, whoever else computes on this one.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock import LLM, SamplingParams
from penstock.model.gguf.reader import read_gguf
from penstock.model.gguf.writer import PendingTensor, encoded, write_gguf
from penstock.model.tensor import FORMATS

LEARNED = 4  # prompts before what counts: from them it is learned what steps cost and how much is accepted
PROMPTS = (  # each is answered once, so that nothing can be copied from an earlier answer to the same one
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she",
    "Once upon a time, in a small house near the forest, there lived a big brown dog named Max. Max liked to",
    "Tom and his mom went to the store. Tom saw a red toy car and he wanted it very much. He said,",
    "One day, a little bird fell out of its nest. The bird was scared and cold. A kind cat saw the bird and",
    "There was a boy named Tim who had a shiny blue ball. He took it to the park every day. One sunny day,",
    "Sara and Ben were playing with blocks on the floor. They wanted to build a tall tower. Sara said,",
    "Mia had a pet fish that lived in a round bowl. Every morning she gave it some food. But one morning,",
    "The old farmer had many animals. He had cows, sheep and a very lazy pig. The pig did not want to",
    "It was a rainy day and Jack could not go outside. He was bored, so he asked his grandma to",
    "Once there was a little frog who was afraid of the water. All the other frogs could swim, but",
    "Anna found a small key under her bed. She did not know what it was for. She went to her dad and",
    "A big yellow truck drove down the road every day. It carried sand to the beach. One day the truck",
    "Lucy and her brother wanted to bake a cake for their mom. They took flour, eggs and milk, and then",
    "In the tall tree there lived a wise owl. The other animals came to the owl when they had a problem.",
)


def main() -> None:
    options = parse()
    draft = options.draft or str(from_llama2c(Path(options.llama2c), Path(options.model)))
    engine: dict[str, Any] = {"threads": options.threads, "max_len": options.max_len, "max_rows": 4}
    sides = {
        "off": LLM(options.model, speculation="off", **engine),
        "copies": LLM(options.model, **engine),
        "draft": LLM(options.model, draft=draft, quantize=options.quantize, **engine),
    }
    params = SamplingParams(temperature=options.temperature, seed=1, max_tokens=options.tokens, ignore_eos=True)
    ratios: dict[str, list[float]] = {"copies": [], "draft": []}
    prompts: list[Any] = list(questions(options.questions, options.every)) if options.questions else list(PROMPTS)
    differ = 0
    for number, prompt in enumerate(prompts):
        spent, answers = zip(*(timed(llm, prompt, params) for llm in sides.values()), strict=True)
        differ += any(answer != answers[0] for answer in answers)
        if number >= LEARNED:
            ratios["copies"].append(spent[0] / spent[1])
            ratios["draft"].append(spent[0] / spent[2])
            print("  ".join(f"{side} {seconds:.2f} s" for side, seconds in zip(sides, spent, strict=True)))
    for side, found in ratios.items():
        print(f"{side}: median {median(found):.2f}x of {len(found)}, from {min(found):.2f}x to {max(found):.2f}x")
    print(f"{differ} of {len(prompts)} answers differ")


def questions(path: Path, every: int) -> Iterator[list[dict[str, str]]]:
    """Yields every so many of a file's questions, as chats."""
    for line in path.read_text(encoding="utf-8").splitlines()[::every]:
        yield [{"role": "user", "content": json.loads(line)["turns"][0]}]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft", default="")
    parser.add_argument("--llama2c", default="")
    parser.add_argument("--quantize", default="q8_0", help="what plain weights of the draft model become")
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--max-len", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def timed(llm: LLM, prompt: Any, params: SamplingParams) -> tuple[float, list[int]]:
    """Returns the processor time and the tokens of an answer to a text or a chat."""
    began = process_time()
    ask = llm.generate if isinstance(prompt, str) else llm.chat
    [output] = ask(prompt, params, use_tqdm=False)
    return process_time() - began, list(output.outputs[0].token_ids)


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
