"""Looks codes of 4 bits up in a table: a byte permutation finds four of them among eight bytes.

Numbers are bfloat16, so the table lies in two planes, of low and of high bytes. A table for all kernels of a coding is
one number when they are compiled: 16 times 16 bits.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from penstock.backend.cuda.kernels.interpreter import INTERPRETED
from penstock.backend.cuda.quant_blocks import Coding


def table_of(coding: Coding) -> int:
    """Returns a coding's table as one number, its first bfloat16 in the lowest bits; 0 where it has none."""
    numbers = np.array(coding.table, np.float32).view(np.uint32)
    return sum(int(bits >> 16) << 16 * i for i, bits in enumerate(numbers))


@triton.constexpr_function
def words_of(table, shift):
    plane = [table >> (16 * i + shift) & 255 for i in range(16)]
    return [sum(plane[4 * j + i] << 8 * i for i in range(4)) for j in range(4)]


@triton.constexpr_function
def instructions(table):
    """Returns PTX: $4 holds eight codes; $0 to $3 become two numbers each, of codes that lie side by side."""
    short = table >> 128 == 0  # the codes have no fourth bit
    text = "{ .reg .b32 s, t, a, b, l, h; and.b32 s, $4, 0x77777777;"
    if not short:
        text += " shr.b32 t, $4, 1; lop3.b32 t, t, 0x44444444, 0x32103210, 0xEA;"  # 3210, and 4 more for a fourth bit
    for half in range(2):
        for plane, shift in (("l", 0), ("h", 8)):
            first, second, third, fourth = words_of(table, shift)
            text += f" mov.b32 a, {first}; mov.b32 b, {second}; prmt.b32 {plane}, a, b, s;"
            if not short:
                text += f" mov.b32 a, {third}; mov.b32 b, {fourth}; prmt.b32 a, a, b, s;"
                text += f" prmt.b32 {plane}, {plane}, a, t;"
        text += f" prmt.b32 ${2 * half}, l, h, 0x5140; prmt.b32 ${2 * half + 1}, l, h, 0x7362;"
        if half == 0:
            text += " shr.b32 s, s, 16;" if short else " shr.b32 s, s, 16; shr.b32 t, t, 16;"
    return text + " }"


@triton.jit
def entries(words, TABLE: tl.constexpr):
    """Looks codes up in the interpreter, which knows no PTX: [...] -> [..., half, side, e]."""
    pairs = tl.join(tl.join(words, words >> 8), tl.join(words >> 16, words >> 24))
    codes = tl.join(pairs & 15, (pairs >> 4) & 15)
    bits = codes * 0
    for i in tl.static_range(16):
        bits = tl.where(codes == i, (TABLE >> (16 * i)) & 0xFFFF, bits)
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def looked_up(words, TABLE: tl.constexpr):
    """Looks the eight codes of each word up: [t, g, A, B, C, c] -> [t, g, A, B, C, c, half, side, e] of bfloat16."""
    if INTERPRETED:
        return entries(words, TABLE)
    else:
        kinds: tl.constexpr = (tl.uint32, tl.uint32, tl.uint32, tl.uint32)
        first, second, third, fourth = tl.inline_asm_elementwise(
            instructions(TABLE), "=&r,=&r,=&r,=&r,r", [words], kinds, is_pure=True, pack=1
        )
        both = tl.join(tl.join(first, second), tl.join(third, fourth))
        low = (both & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        high = (both >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        return tl.join(low, high)
