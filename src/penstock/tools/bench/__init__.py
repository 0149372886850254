"""Generates closed-loop load for engines and OpenAI-compatible servers."""

from __future__ import annotations

from penstock.tools.bench.load import DraftTotals, RequestTiming, Result, Target, Workload, run, run_workload
from penstock.tools.bench.targets import EngineTarget, UrlTarget

__all__ = [
    "DraftTotals",
    "EngineTarget",
    "RequestTiming",
    "Result",
    "Target",
    "UrlTarget",
    "Workload",
    "run",
    "run_workload",
]
