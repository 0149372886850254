"""Holds the tools around the engine: benchmarks, simulators, traces. The serving code imports none of them."""
