"""A closed-loop load generator for engines and OpenAI-compatible servers."""

from __future__ import annotations

from penstock.bench.load import Load, Result, Sample, Target, drive, run
from penstock.bench.targets import EngineTarget, UrlTarget

__all__ = ["EngineTarget", "Load", "Result", "Sample", "Target", "UrlTarget", "drive", "run"]
