"""Plans models before they are downloaded, with the options of a command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.terminal import note, readable_size
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.planning.forecast import Forecast
    from penstock.planning.memory_plan import MemoryPlan
    from penstock.store import PlannedFit

CONTEXT = 4096  # tokens of context to plan for, if the model supports them


class MemoryAdvisor:
    """Plans a model as `penstock plan`, for the device in the engine's options."""

    def __init__(self, engine: Mapping[str, Any], force: bool = False) -> None:
        # draft may not be downloaded yet
        self._engine = {name: value for name, value in engine.items() if name != "draft"}
        self.force = force

    def tell(self, text: str) -> None:
        note(text)

    def plan(self, path: Path) -> PlannedFit | None:
        from penstock.backend.devices import may_own_memory
        from penstock.config import AUTO

        if may_own_memory(str(self._engine.get("device", AUTO))):
            return plan_in_child(path, self._engine)
        return plan_fit(path, self._engine)


def plan_in_child(path: Path, engine: Mapping[str, Any]) -> PlannedFit | None:
    """Plans in a separate process, because examining a GPU holds memory there until the process ends."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(1, get_context("spawn")) as child:
        return child.submit(plan_fit, path, engine).result()


def plan_fit(path: Path, engine: Mapping[str, Any]) -> PlannedFit | None:
    """Returns the fit of a model with these engine options; None if unknown."""
    from penstock.config import configure
    from penstock.model.load import open_checkpoint
    from penstock.planning.forecast import make_forecasts
    from penstock.store import PlannedFit

    try:
        config = configure(path, engine)
        checkpoint = open_checkpoint(path, config.config, config.strict_config, config.max_len)
        forecasts = list(make_forecasts(config, checkpoint, 1, lambda *_: None))
    except PenstockError:  # loading the model will report the problem
        return None
    enough = min(CONTEXT, config.max_len or CONTEXT, checkpoint.spec.max_len)
    found = [forecast for forecast in forecasts if forecast.memory]
    if not found:
        return PlannedFit(False, forecasts[0].problem)
    roomy = [forecast for forecast in found if _context(forecast) >= enough]
    best = (roomy or found)[0]
    assert best.memory is not None
    needed = "" if best.quantize == config.quantize else best.quantize
    return PlannedFit(True, _summary(best.memory), bool(roomy), needed)


def _context(forecast: Forecast) -> int:
    return forecast.memory.limits.max_len if forecast.memory else 0


def _summary(memory: MemoryPlan) -> str:
    has = memory.footprint
    takes = f"weights {readable_size(has.weights)}, workspace {readable_size(has.workspace)}"
    cache = f"KV for a context of {memory.limits.max_len:,} tokens"
    return f"{takes} and {cache} fit in the {readable_size(has.free)} that are free of {has.device}"


def with_stored_quantize(path: Path, engine: dict[str, Any]) -> dict[str, Any]:
    """Adds the --quantize that the model was fetched with, if it needs it to fit and the options have none."""
    from penstock.store import entries

    found = next((entry for entry in entries() if entry.path == path and entry.quantize), None)
    if found is None or engine.get("quantize"):
        return engine
    note(f"{found.name} is loaded with --quantize {found.quantize}, which it was fetched for")
    return engine | {"quantize": found.quantize}
