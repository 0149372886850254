"""Plots the distribution of the time to first token as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log10

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # distinguishable with colour blindness
LEFT, TOP, WIDTH, HEIGHT = 60, 50, 640, 320  # plot area in pixels
POINTS = 200  # per line


def ttft_chart(title: str, ttfts: Mapping[str, Sequence[float]]) -> str:
    """Returns an SVG with a line per name: the share of requests (vertical) with a first token within a time in
    milliseconds (horizontal, logarithmic). `ttfts` are ascending.
    """
    low = floor(log10(max(min(times[0] for times in ttfts.values()), 0.1)))
    high = max(ceil(log10(max(times[-1] for times in ttfts.values()))), low + 1)

    def right(value: float) -> float:
        return LEFT + WIDTH * (log10(max(value, 10.0**low)) - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {TOP + HEIGHT + 50}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
        *(_line_of_grid(right(10.0**power), f"{10.0**power:g}") for power in range(low, high + 1)),
        *(_row_of_grid(share) for share in (0, 25, 50, 75, 100)),
        f'<text x="{LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 38}" text-anchor="middle">time to first token, ms</text>',
    ]
    for at, (name, times) in enumerate(ttfts.items()):
        color = COLORS[at % len(COLORS)]
        ranks = [round(step * (len(times) - 1) / POINTS) for step in range(POINTS + 1)]
        points = " ".join(f"{right(times[rank]):.1f},{_down((rank + 1) / len(times)):.1f}" for rank in ranks)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        text = f"{escape(name)}, mean {sum(times) / len(times):,.0f} ms"
        parts.append(f'<text x="{LEFT + 12}" y="{TOP + 18 + 16 * at}" fill="{color}">{text}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _down(share: float) -> float:
    return TOP + HEIGHT * (1 - share)


def _line_of_grid(x: float, label: str) -> str:
    line = f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{TOP + HEIGHT}" stroke="#ddd"/>'
    return f'{line}<text x="{x:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{label}</text>'


def _row_of_grid(percent: int) -> str:
    y = _down(percent / 100)
    line = f'<line x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + WIDTH}" y2="{y:.1f}" stroke="#ddd"/>'
    return f'{line}<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{percent} %</text>'
