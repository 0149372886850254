"""Asks llama.cpp's library what its samplers leave, and writes that down for test_sampler_chain.py.

    python -m tests.engine.llama_cpp_samplers path/to/libllama.so

The goldens come from llama.cpp v0.5.0, as node-llama-cpp packages it. Another build must export
`llama_sampler_init_dry_testing`, and its penalties must take the size of the vocabulary first.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.backend.base import ChainRow, Floats
from penstock.types import DryPenalty, SamplerChain

GOLDENS = Path(__file__).parent / "data" / "llama_cpp_samplers.json"
DRY_TESTING = "_Z30llama_sampler_init_dry_testingffiiRKSt6vectorIS_IiSaIiEESaIS1_EE"
SAMPLERS = SamplerChain().order
Golden = dict[str, Any]


class TokenData(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int32), ("logit", ctypes.c_float), ("p", ctypes.c_float))


class TokenDataArray(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.POINTER(TokenData)),
        ("size", ctypes.c_size_t),
        ("selected", ctypes.c_int64),
        ("sorted", ctypes.c_bool),
    )


class Vector(ctypes.Structure):
    """Is a std::vector as this library's compiler lays it out."""

    _fields_ = (("begin", ctypes.c_void_p), ("end", ctypes.c_void_p), ("room", ctypes.c_void_p))

    @classmethod
    def over(cls, array: Any) -> Vector:
        begin = ctypes.addressof(array)
        return cls(begin, begin + ctypes.sizeof(array), begin + ctypes.sizeof(array))


class Library:
    """Makes and applies llama.cpp's samplers."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)

    def make(self, name: str, *arguments: Any) -> Any:
        function = getattr(self._library, name)
        function.restype = ctypes.c_void_p
        return ctypes.c_void_p(function(*arguments))

    def sampler(self, name: str, row: ChainRow) -> Any:
        """Returns one sampler of a chain. XTC acts if its probability is 1, and not otherwise."""
        chain, real, size = row.chain, ctypes.c_float, ctypes.c_size_t
        arguments: dict[str, tuple[Any, ...]] = {
            "top_n_sigma": (real(chain.top_n_sigma),),
            "top_k": (ctypes.c_int32(row.top_k),),
            "typical_p": (real(chain.typical_p), size(chain.min_keep)),
            "top_p": (real(row.top_p), size(chain.min_keep)),
            "min_p": (real(row.min_p), size(chain.min_keep)),
            "xtc": (real(chain.xtc_probability), real(chain.xtc_threshold), size(chain.min_keep), ctypes.c_uint32(1)),
            "temperature": (real(row.temperature), real(chain.dynatemp_range), real(chain.dynatemp_exponent)),
        }
        native = {"typical_p": "typical", "temperature": "temp_ext"}.get(name, name)
        return self.make(f"llama_sampler_init_{native}", *arguments[name])

    def mirostat(self, row: ChainRow, vocab: int) -> Any:
        tau, eta, seed = (
            ctypes.c_float(row.chain.mirostat_tau),
            ctypes.c_float(row.chain.mirostat_eta),
            ctypes.c_uint32(1),
        )
        if row.chain.mirostat == 1:
            return self.make("llama_sampler_init_mirostat", ctypes.c_int32(vocab), seed, tau, eta, ctypes.c_int32(100))
        return self.make("llama_sampler_init_mirostat_v2", seed, tau, eta)

    def dry(self, dry: DryPenalty, breakers: Sequence[Sequence[int]]) -> Any:
        arrays = [(ctypes.c_int32 * len(breaker))(*breaker) for breaker in breakers]
        inner = (Vector * len(arrays))(*[Vector.over(array) for array in arrays])
        numbers = ctypes.c_float(dry.multiplier), ctypes.c_float(dry.base)
        whole = ctypes.c_int32(dry.allowed_length), ctypes.c_int32(dry.window)
        return self.make(DRY_TESTING, *numbers, *whole, ctypes.byref(Vector.over(inner)))

    def accept(self, sampler: Any, token: int) -> None:
        self._library.llama_sampler_accept(sampler, ctypes.c_int32(token))

    def apply(self, logits: Floats, *samplers: Any) -> tuple[dict[int, float], int]:
        """Returns the logits of the tokens that the samplers leave, and the token that they select, or -1."""
        data = (TokenData * len(logits))(*[(id, logit, 0.0) for id, logit in enumerate(logits.tolist())])
        array = TokenDataArray(data, len(logits), -1, False)
        for sampler in samplers:
            self._library.llama_sampler_apply(sampler, ctypes.byref(array))
        left = {array.data[i].id: float(array.data[i].logit) for i in range(array.size)}
        return left, array.data[array.selected].id if array.selected >= 0 else -1


def probabilities(logits: dict[int, float]) -> dict[int, float]:
    """Returns the probabilities of those tokens that are possible at all."""
    highest = max(logits.values())
    weights = {token: float(np.exp(np.float64(logit) - highest)) for token, logit in logits.items()}
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items() if weight > 0}


def logits_of(case: Golden) -> Floats:
    """Returns the logits of a golden case."""
    rng = np.random.default_rng(case["seed"])
    logits = (rng.normal(size=case["vocab"]) * case["spread"]).astype(np.float32)
    logits[rng.permutation(case["vocab"])[: case["banned"]]] = -np.inf
    return logits


def row_of(case: Golden) -> ChainRow:
    """Returns the chain of a golden case."""
    chain = SamplerChain(**{**case["chain"], "order": tuple(case["chain"].get("order", SAMPLERS))})
    numbers = (case[name] for name in ("temperature", "top_p", "top_k", "min_p"))
    return ChainRow(0, chain, *numbers, mu=2 * chain.mirostat_tau)


def random_case(random: random.Random, vocab: int) -> Golden:
    """Returns a chain with some samplers on, in some order."""
    on = set(random.sample(SAMPLERS, random.choice((1, 1, 2, 3, 7))))
    values = {
        "top_n_sigma": round(random.uniform(0.3, 2.5), 2) if "top_n_sigma" in on else -1.0,
        "typical_p": round(random.uniform(0.1, 0.95), 2) if "typical_p" in on else 1.0,
        "xtc_probability": float("xtc" in on),
        "xtc_threshold": round(random.uniform(0.01, 0.3), 2),
        "dynatemp_range": round(random.uniform(0.1, 1.5), 2) if random.random() < 0.5 else 0.0,
        "dynatemp_exponent": round(random.uniform(0.5, 2.0), 2),
        "min_keep": random.choice((0, 0, 0, 1, 3)),
        "order": random.sample(SAMPLERS, len(SAMPLERS)) if random.random() < 0.5 else SAMPLERS,
    }
    # After its top-n-sigma, whose tokens stay with a probability of 0, llama.cpp's typical_p has no entropy.
    if values["top_n_sigma"] > 0:
        values["typical_p"] = 1.0
    return {
        "seed": random.randrange(2**32),
        "vocab": vocab,
        "spread": round(random.uniform(0.5, 4.0), 2),
        "banned": 0 if values["typical_p"] < 1 else random.choice((0, 0, vocab // 4)),
        "temperature": round(random.uniform(0.3, 2.0), 2) if "temperature" in on else 1.0,
        "top_p": round(random.uniform(0.1, 0.95), 2) if "top_p" in on else 1.0,
        "top_k": random.randrange(1, vocab // 2) if "top_k" in on else 0,
        "min_p": round(random.uniform(0.01, 0.5), 2) if "min_p" in on else 0.0,
        "chain": values,
    }


def chain_golden(library: Library, case: Golden) -> Golden:
    row = row_of(case)
    left, _ = library.apply(logits_of(case), *[library.sampler(name, row) for name in row.chain.order])
    return case | {"left": {str(token): round(p, 6) for token, p in sorted(probabilities(left).items())}}


def mirostat_golden(library: Library, version: int, seed: int) -> Golden:
    """Returns what mirostat left and chose at each of some steps. Its state changes with each choice."""
    chain = {"mirostat": version, "mirostat_tau": 2.0 + seed % 3, "mirostat_eta": 0.3}
    numbers = {"temperature": 0.8, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "chain": chain}
    steps = [{"seed": 100 * seed + step, "vocab": 80, "spread": 2.5, "banned": 0} for step in range(12)]
    row = row_of(numbers)
    samplers = library.make("llama_sampler_init_temp", ctypes.c_float(0.8)), library.mirostat(row, 80)
    for step in steps:
        left, chosen = library.apply(logits_of(step), *samplers)
        chances = probabilities(left)
        step |= {"left": len(chances), "chosen": chosen, "p": round(chances[chosen], 6)}
    return numbers | {"steps": steps}


def dry_golden(library: Library, random: random.Random) -> Golden:
    """Returns what the DRY penalty subtracts after a history of few different tokens."""
    dry = DryPenalty(
        round(random.uniform(0.2, 2.0), 2),
        random.choice((1.0, 1.2, 1.75, 3.0)),
        random.randrange(5),
        random.choice((5, 20, 60, 200)),
        (),
    )
    vocab = random.choice((2, 4, 8))
    phrase = [random.randrange(vocab) for _ in range(random.randrange(3, 12))]
    noise = random.choice((0.0, 0.02, 0.2, 1.0))
    length = random.randrange(1, 150)
    history = [random.randrange(vocab) if random.random() < noise else phrase[i % len(phrase)] for i in range(length)]
    count = random.randrange(1, 4)
    breakers = [[random.randrange(12) for _ in range(random.choice((1, 1, 2, 3)))] for _ in range(count)]
    sampler = library.dry(dry, breakers)
    for token in history:
        library.accept(sampler, token)
    left, _ = library.apply(np.zeros(12, np.float32), sampler)
    penalties = {str(token): -logit for token, logit in left.items() if logit}
    return {"dry": dry[:4], "breakers": breakers, "history": history, "penalties": penalties}


def penalties_golden(library: Library, random: random.Random) -> Golden:
    """Returns the logits that penalties over a window leave of logits from -3 to 3."""
    window, numbers = (
        random.choice((1, 4, 64)),
        (random.choice((1.0, 1.3)), random.choice((0.0, 0.4)), random.choice((0.0, 0.7))),
    )
    history = [random.randrange(7) for _ in range(random.randrange(1, 30))]
    sampler = library.make(
        "llama_sampler_init_penalties", ctypes.c_int32(7), ctypes.c_int32(window), *map(ctypes.c_float, numbers)
    )
    for token in history:
        library.accept(sampler, token)
    left, _ = library.apply(np.arange(-3, 4, dtype=np.float32), sampler)
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    settings = dict(zip(names, numbers, strict=True)) | {"penalty_window": window}
    return {"settings": settings, "history": history, "logits": [round(left[token], 5) for token in range(7)]}


def goldens(library: Library) -> Iterator[tuple[str, list[Golden]]]:
    chance = random.Random(13)
    yield "chains", [chain_golden(library, random_case(chance, 60)) for _ in range(80)]
    yield "mirostat", [mirostat_golden(library, version, seed) for version in (1, 2) for seed in range(1, 4)]
    yield "dry", [dry_golden(library, chance) for _ in range(60)]
    yield "penalties", [penalties_golden(library, chance) for _ in range(20)]


def main() -> None:
    found = dict(goldens(Library(sys.argv[1])))
    lines = [f'"{kind}": [\n' + ",\n".join(json.dumps(case) for case in cases) + "\n]" for kind, cases in found.items()]
    GOLDENS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
