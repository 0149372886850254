"""The instructions that look codes up, one by one: the interpreter of Triton has none."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("triton")

from penstock.backend.cuda.kernels.lookup import instructions, table_of
from penstock.backend.cuda.pack_quantized import CODINGS

pytestmark = pytest.mark.cuda
TABLED = {name: coding for name, coding in CODINGS.items() if coding.table}


def prmt(a: int, b: int, selector: int) -> int:
    both = (a | b << 32).to_bytes(8, "little")
    assert not selector & 0x8888
    return sum(both[selector >> 4 * i & 7] << 8 * i for i in range(4))


def lop3(a: int, b: int, c: int, truth: int) -> int:
    return sum((truth >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32))


OPERATIONS = {
    "mov": lambda a: a,
    "and": lambda a, b: a & b,
    "shr": lambda a, by: a >> by,
    "lop3": lop3,
    "prmt": lambda a, b, selector: prmt(a, b, selector & 0xFFFF),
}


def executed(text: str, word: int) -> list[int]:
    registers = {"$4": word}
    for operation, operands in re.findall(r"(\w+)\.b32 ([^;.]+);", text.partition(";")[2]):
        target, *sources = operands.split(", ")
        registers[target] = OPERATIONS[operation](*(registers[x] if x in registers else int(x, 0) for x in sources))
    return [registers[f"${i}"] for i in range(4)]


@pytest.mark.parametrize("name", TABLED)
def test_instructions_look_up_what_a_table_has(name: str) -> None:
    coding = TABLED[name]
    codes = np.random.default_rng(0).integers(0, len(coding.table), (50, 8))
    for eight in codes.tolist():
        word = sum(code << 4 * i for i, code in enumerate(eight))
        got = np.array(executed(instructions(table_of(coding)), word), "<u4").view("<u2").astype(np.uint32) << 16
        assert got.view(np.float32).tolist() == [coding.table[code] for code in eight]
