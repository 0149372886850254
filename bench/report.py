"""From figures to a table, to what stands behind, and to a plot against the machine's limits."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from penstock.model.gguf.reader import read_gguf

OURS, PEERS = "penstock", ("llama.cpp", "openvino")
TITLES = {
    "decode": "one stream, decode 128 after 128",
    "neighbour": "one stream, decode, beside a process that takes a core",
    "prefill": "prefill 512",
    "batch8": "8 sequences, 128 in / 128 out",
    "batch32": "32 sequences, 128 in / 128 out",
    "http32": "32 clients over HTTP, 128 in / 128 out",
    "prefix32": "32 clients, a 1,500-token prefix in common, 64 out, cold",
    "start": "process start to first token",
}
COLOURS = {"penstock": "#1f6feb", "llama.cpp": "#d97706", "openvino": "#9ca3af"}


class Machine(NamedTuple):
    """What the hardware can do, measured apart."""

    read: float  # bytes a second from memory
    int8: float  # multiply-adds and adds a second, both counted


class Line(NamedTuple):
    """One row of the table: the figures of each round, by peer."""

    model: str
    cell: str
    unit: str
    values: dict[str, list[float]]

    def ratio(self, peer: str) -> float | None:
        """How many times better ours is: the median over rounds, each against the peer's run beside it."""
        pairs = list(zip(self.values.get(OURS, ()), self.values.get(peer, ()), strict=False))
        if not pairs:
            return None
        return statistics.median(a / b if self.unit == "tok/s" else b / a for a, b in pairs)


def limits(model: Path, machine: Machine) -> dict[str, float]:
    """The most tokens a second that this machine could reach by cell: a step reads every weight once at memory speed,
    a token multiplies every weight at int8 speed, and only tokens that are answered go through the output head."""
    tensors = read_gguf(model).tensors
    head = "output.weight" if "output.weight" in tensors else "token_embd.weight"
    layers = [t for name, t in tensors.items() if len(t.shape) == 2 and name not in (head, "token_embd.weight")]
    read = sum(t.data.nbytes for t in [*layers, tensors[head]]) / machine.read
    prompt = sum(2 * t.shape[0] * t.shape[1] for t in layers) / machine.int8
    answer = prompt + 2 * tensors[head].shape[0] * tensors[head].shape[1] / machine.int8

    def batch(rows: int) -> float:
        return 1 / (prompt + max(read / rows, answer))

    return {"decode": 1 / read, "prefill": 1 / prompt, "batch8": batch(8), "batch32": batch(32), "http32": batch(32)}


def lines(results: dict[str, Any]) -> list[Line]:
    table: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for figure in results["figures"]:
        row = table.setdefault((figure["model"], figure["cell"], figure["unit"]), {})
        row.setdefault(figure["peer"], []).append(figure["value"])
    return [Line(*key, values) for key, values in table.items()]


def table(results: dict[str, Any]) -> str:
    peers = [peer for peer in PEERS if peer in results["peers"]]
    head = ["file", "work", "unit", OURS, *peers, *(f"× {peer}" for peer in peers), "of the limit"]
    rows = [_cells(line, peers, results["limits"]) for line in lines(results)]
    grid = "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])
    return f"{grid}\n\n{neighbours(results)}"


def neighbours(results: dict[str, Any]) -> str:
    """How far the figures can be trusted."""
    shares = [figure["others"] for figure in results["figures"]]
    return (
        f"Medians on {results['date']}, lowest and highest in parentheses. Meanwhile other processes used "
        f"{statistics.median(shares):.0%} of the machine (median; at most {max(shares):.0%})."
    )


def _cells(line: Line, peers: Sequence[str], limits: dict[str, dict[str, float]]) -> Iterator[str]:
    yield from (line.model, TITLES[line.cell], line.unit)
    yield from (_spread(line.values.get(peer, [])) for peer in [OURS, *peers])
    yield from ("" if (ratio := line.ratio(peer)) is None else f"**{ratio:.2f}**" for peer in peers)
    share = _share(line, OURS, limits)
    yield f"{share:.0%}" if share else ""


def _spread(values: list[float]) -> str:
    if not values:
        return "–"
    middle, low, high = (_short(v) for v in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low}–{high})" if len(values) > 1 else middle


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _share(line: Line, peer: str, limits: dict[str, dict[str, float]]) -> float | None:
    limit = limits.get(line.model, {}).get(line.cell)
    values = line.values.get(peer)
    return statistics.median(values) / limit if limit and values and line.unit == "tok/s" else None


def behind(results: dict[str, Any]) -> str:
    """Every figure where a peer is ahead of ours."""
    short = [
        f"{line.model}, {TITLES[line.cell]} ({line.unit}): {ratio:.2f} × {peer}"
        for line in lines(results)
        for peer in PEERS
        if (ratio := line.ratio(peer)) is not None and ratio < 1
    ]
    return "\n".join(f"- {text}" for text in short) or "Nowhere in this run."


def fill(page: Path, mark: str, text: str) -> None:
    """Puts `text` between the page's two comments that name `mark`."""
    before, opening, rest = page.read_text().partition(f"<!-- {mark} -->\n")
    _, closing, after = rest.partition(f"<!-- end of {mark} -->")
    if not closing:
        raise SystemExit(f"{page} has no place for {mark!r}: it needs <!-- {mark} --> and <!-- end of {mark} -->")
    page.write_text(f"{before}{opening}{text}\n{closing}{after}")


def plot(results: dict[str, Any]) -> str:
    """An SVG: for each file and cell with a limit, the share of it that each engine reaches."""
    rows = [line for line in lines(results) if _share(line, OURS, results["limits"])]
    peers = [OURS, *(peer for peer in PEERS if peer in results["peers"])]
    pitch, top, left, width = 11 * len(peers) + 12, 46, 330, 560
    height = top + pitch * len(rows) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 20}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="14" font-size="13">Share of what the machine could do at most</text>',
    ]
    for i, peer in enumerate(peers):
        parts.append(f'<rect x="{10 + 105 * i}" y="6" width="10" height="10" fill="{COLOURS[peer]}"/>')
        parts.append(f'<text x="{24 + 105 * i}" y="15">{escape(peer)}</text>')
    for percent in range(0, 101, 20):
        x = left + width * percent // 100
        parts.append(f'<path d="M{x} 34V{height - 8}" stroke="#ddd"/><text x="{x - 9}" y="30">{percent} %</text>')
    for i, line in enumerate(rows):
        parts += _bars(line, peers, results["limits"], (left, top + i * pitch, width))
    return "\n".join([*parts, "</svg>", ""])


def _bars(line: Line, peers: Sequence[str], limits: dict[str, dict[str, float]], at: tuple[int, int, int]) -> list[str]:
    left, y, width = at
    parts = [f'<text x="10" y="{y + 12}">{escape(line.model)}</text>']
    parts.append(f'<text x="10" y="{y + 25}" fill="#666">{escape(TITLES[line.cell])}</text>')
    for i, peer in enumerate(peers):
        if share := _share(line, peer, limits):
            length = round(width * min(share, 1))
            parts.append(f'<rect x="{left}" y="{y + 11 * i}" width="{length}" height="10" fill="{COLOURS[peer]}"/>')
            parts.append(f'<text x="{left + length + 3}" y="{y + 11 * i + 9}" font-size="9">{share:.0%}</text>')
    return parts
