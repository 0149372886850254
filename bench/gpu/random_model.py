"""A model of random weights as files that `penstock serve` takes: a Hugging Face folder, or a GGUF file.

Needs neither torch nor a network. Weights are slices of one pool of random values, because making 16 GB of them would
take longer than serving them; the vocabulary is made of random words, with as many tokens and merges as it claims.
"""

from __future__ import annotations

import json
import os
import random
import string
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from model_shapes import EXPONENTS, ONES, Llama, Piece, Shape
from numpy.typing import NDArray

from penstock.model.dequantize import layout_of
from penstock.model.tensor import FORMATS
from penstock.text.tokenizer_spec import _BYTES as BYTES

POOL = 1 << 26  # bytes of random values of one format
SHARDS = 4
DTYPES = {ONES: "BF16", EXPONENTS: "U8"}  # of kinds that are no formats themselves
DTYPE_BYTES = {"BF16": 2, "U8": 1}
ALIGNMENT = 32  # of tensors in a GGUF file
SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
CHAT = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n"
)


# -- values -------------------------------------------------------------------------------------------------------


def random_pool(format: str, size: int) -> NDArray[np.uint8]:
    """Whole blocks of a format, about `size` bytes of them, of values about 0.02 large."""
    dice = np.random.default_rng(0)
    layout = layout_of(format)
    count = max(size // layout.itemsize, 1)
    if format == "BF16":
        wide = dice.standard_normal(count, np.float32) * np.float32(0.02)
        return (wide.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    blocks = dice.integers(0, 256, (count, layout.itemsize), np.uint8).reshape(-1).view(layout)
    for field in {"d", "m"} & set(layout.names or ()):
        blocks[field] = dice.uniform(1e-4, 1e-3, count)
    return blocks.view(np.uint8)


def size_of(format: str, shape: Sequence[int]) -> int:
    return prod(shape) // FORMATS[format].values * FORMATS[format].bytes


@dataclass(frozen=True, slots=True)
class Content:
    """Where a tensor's bytes lie in its file."""

    offset: int
    size: int
    pool: NDArray[np.uint8]

    def write(self, file: int, start: int) -> None:
        """From some block of the pool on, around and around."""
        at, left, place = start % len(self.pool), self.size, self.offset
        while left:
            written = os.pwrite(file, memoryview(self.pool)[at : at + left], place)
            at, left, place = (at + written) % len(self.pool), left - written, place + written


def write_file(path: Path, head: bytes, contents: Sequence[Content]) -> None:
    with path.open("wb") as file:
        file.write(head)
        file.flush()
        for number, content in enumerate(contents):
            content.write(file.fileno(), number * 4099 * 5040)  # a multiple of every block's size


# -- a folder -----------------------------------------------------------------------------------------------------


def write_folder(folder: Path, shape: Shape) -> None:
    folder.mkdir(parents=True)
    pools = {
        "BF16": random_pool("BF16", POOL),
        "U8": np.random.default_rng(0).integers(0, 256, POOL, np.uint8),
        ONES: np.full(4096, 0x3F80, np.uint16).view(np.uint8),
        EXPONENTS: np.full(4096, 118, np.uint8),  # of scales: 2 to the power of -9
    }
    listed = list(shape.pieces())
    cut = -(-len(listed) // SHARDS)
    shards = {f"model-{i + 1:05}-of-{SHARDS:05}.safetensors": listed[i * cut : (i + 1) * cut] for i in range(SHARDS)}
    with ThreadPoolExecutor(SHARDS) as threads:
        list(threads.map(lambda shard: write_shard(folder / shard[0], shard[1], pools), shards.items()))
    places = {piece.name: file for file, shard in shards.items() for piece in shard}
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})
    write_json(folder / "config.json", shape.config())
    write_json(folder / "generation_config.json", {"eos_token_id": [special_id(shape.vocab, "<|eot_id|>")]})
    vocabulary = make_vocabulary(shape.vocab)
    write_json(folder / "tokenizer.json", tokenizer_of(vocabulary))
    names = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[4]}
    write_json(folder / "tokenizer_config.json", {**names, "add_bos_token": True, "chat_template": CHAT})


def folder_bytes(shape: Shape) -> int:
    """Returns how many bytes the weights of a folder take."""
    return sum(prod(piece.shape) * DTYPE_BYTES[DTYPES.get(piece.kind, piece.kind)] for piece in shape.pieces())


def write_shard(path: Path, shard: Sequence[Piece], pools: dict[str, NDArray[np.uint8]]) -> None:
    header: dict[str, Any] = {}
    at = 0
    for piece in shard:
        dtype = DTYPES.get(piece.kind, piece.kind)
        end = at + prod(piece.shape) * DTYPE_BYTES[dtype]
        header[piece.name] = {"dtype": dtype, "shape": piece.shape, "data_offsets": [at, end]}
        at = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 64)
    first = 8 + len(head)
    places = [(piece.kind, header[piece.name]["data_offsets"]) for piece in shard]
    contents = [Content(first + start, end - start, pools[kind]) for kind, (start, end) in places]
    write_file(path, struct.pack("<Q", len(head)) + head, contents)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


# -- a vocabulary -------------------------------------------------------------------------------------------------


class Vocabulary(NamedTuple):
    tokens: list[str]  # ordinary ones first, special ones last
    merges: list[tuple[str, str]]
    ordinary: int


def make_vocabulary(size: int) -> Vocabulary:
    """Every byte, then words of two, four and six letters that each join two tokens before them, then special ones."""
    dice = random.Random(0)
    specials = [*SPECIAL, *(f"<|reserved_{i}|>" for i in range(256 - len(SPECIAL)))]
    left = size - len(specials) - len(BYTES)
    letters = list(string.ascii_lowercase + "\u0120")  # the byte alphabet's space
    twos = dice.sample(list(product(letters, letters)), min(left, 700))
    pairs = ["".join(merge) for merge in twos]
    fours = dice.sample(list(product(pairs, pairs)), min(left - len(twos), 20_000))
    words = ["".join(merge) for merge in fours]
    sixes = [
        (words[at // len(pairs)], pairs[at % len(pairs)])
        for at in dice.sample(range(len(words) * len(pairs)), left - len(twos) - len(fours))
    ]
    merges = [*twos, *fours, *sixes]
    tokens = [*BYTES, *map("".join, merges)]
    return Vocabulary(tokens + specials, merges, len(tokens))


def special_id(vocab: int, token: str) -> int:
    return vocab - 256 + SPECIAL.index(token)


def tokenizer_of(vocabulary: Vocabulary) -> dict[str, Any]:
    split = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = enumerate(vocabulary.tokens[vocabulary.ordinary :], vocabulary.ordinary)
    return {
        "version": "1.0",
        "added_tokens": [{"id": id, "content": token, **flags} for id, token in added],
        "pre_tokenizer": split,
        "decoder": split,
        "model": {
            "type": "BPE",
            "vocab": {token: id for id, token in enumerate(vocabulary.tokens[: vocabulary.ordinary])},
            "merges": vocabulary.merges,
        },
    }


# -- a GGUF file --------------------------------------------------------------------------------------------------

GGUF_KINDS = {"F32": 0, "Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14}


def write_gguf(path: Path, dims: Llama, format: str) -> None:
    """Matrices in `format`; as in files made by llama.cpp the head of Q4_K is of Q6_K."""
    pools = {name: random_pool(name, POOL) for name in {format, "Q6_K"}}
    pools["F32"] = np.ones(dims.dim, np.float32).view(np.uint8)
    listed = [(piece, gguf_format(piece, format)) for piece in dims.pieces()]
    places, contents, at = [], [], 0
    for piece, kind in listed:
        name = piece.gguf_name.encode()
        shape = piece.shape[::-1]
        places.append(text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, GGUF_KINDS[kind], at))
        contents.append((at, size_of(kind, piece.shape), pools[kind]))
        at += -(-contents[-1][1] // ALIGNMENT) * ALIGNMENT
    pairs = gguf_metadata(dims)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(listed), len(pairs)) + b"".join(pairs) + b"".join(places)
    head += bytes(-len(head) % ALIGNMENT)
    path.parent.mkdir(parents=True)
    write_file(path, head, [Content(len(head) + offset, size, pool) for offset, size, pool in contents])


def gguf_format(piece: Piece, format: str) -> str:
    if len(piece.shape) == 1:
        return "F32"
    return "Q6_K" if piece.gguf_name == "output.weight" and format == "Q4_K" else format


def gguf_metadata(dims: Llama) -> list[bytes]:
    vocabulary = make_vocabulary(dims.vocab)
    kinds = [1] * vocabulary.ordinary + [3] * (len(vocabulary.tokens) - vocabulary.ordinary)
    numbers = {
        "block_count": dims.layers,
        "context_length": dims.context,
        "embedding_length": dims.dim,
        "feed_forward_length": dims.hidden,
        "attention.head_count": dims.heads,
        "attention.head_count_kv": dims.kv_heads,
        "attention.key_length": dims.head_dim,
        "attention.value_length": dims.head_dim,
    }
    return [
        pair("general.architecture", 8, text(b"llama")),
        *(pair(f"llama.{name}", 4, struct.pack("<I", number)) for name, number in numbers.items()),
        pair("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)),
        pair("llama.rope.freq_base", 6, struct.pack("<f", 500000.0)),
        pair("tokenizer.ggml.model", 8, text(b"gpt2")),
        pair("tokenizer.ggml.pre", 8, text(b"llama-bpe")),
        pair("tokenizer.ggml.tokens", 9, texts(vocabulary.tokens)),
        pair("tokenizer.ggml.token_type", 9, struct.pack(f"<IQ{len(kinds)}i", 5, len(kinds), *kinds)),
        pair("tokenizer.ggml.merges", 9, texts([" ".join(merge) for merge in vocabulary.merges])),
        pair("tokenizer.ggml.bos_token_id", 4, struct.pack("<I", special_id(dims.vocab, SPECIAL[0]))),
        pair("tokenizer.ggml.eos_token_id", 4, struct.pack("<I", special_id(dims.vocab, SPECIAL[4]))),
        pair("tokenizer.chat_template", 8, text(CHAT.encode())),
    ]


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key.encode()) + struct.pack("<I", kind) + value


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def texts(values: Sequence[str]) -> bytes:
    return struct.pack("<IQ", 8, len(values)) + b"".join(text(value.encode()) for value in values)
