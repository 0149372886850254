"""Tools around the engine: benchmarks, simulators, traces. Nothing that serves imports them."""
