"""Reads the machine code of compiled kernels, with the disassembler that comes with Triton."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton

DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)(.*)")
LABEL = re.compile(r"\s*\.(L_x_\d+):")
TARGET = re.compile(r"\(\.(L_x_\d+)\)")
SHORTEST_LOOP = 100  # instructions: shorter ones reduce large angles, step by step, in an array that is no spill


def spilled(cubin: bytes) -> float:
    """Returns how large a share of a loop's instructions reads or writes what did not fit into registers: of that loop
    where it is the largest."""
    code, labels = disassembled(cubin)
    shares = [0.0]
    for end, (_, rest) in enumerate(code):
        begin = labels.get(found[1], end) if (found := TARGET.search(rest)) else end
        if end - begin >= SHORTEST_LOOP:
            body = [name for name, _ in code[begin:end]]
            shares.append(sum(name.startswith(("LDL", "STL")) for name in body) / len(body))
    return max(shares)


def disassembled(cubin: bytes) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """Returns instructions, each with its operands, and which of them labels stand before."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([DISASSEMBLER, "-c", file.name], capture_output=True, text=True, check=True).stdout
    code: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := INSTRUCTION.search(line):
            code.append((found[1], found[2]))
    return code, labels
