"""Implements `penstock plan`, which forecasts whether a model fits and how fast it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from penstock.cli.fitting import MemoryAdvisor
from penstock.cli.framework import options
from penstock.cli.framework.command import Option
from penstock.cli.machine_profile import busy_text, is_busy, machine_profile
from penstock.cli.terminal import obtain, print_filled, print_json, print_table, readable_size

if TYPE_CHECKING:
    from penstock.planning.forecast import Forecast, Speed

REMARKS = 32  # characters before a line's remarks


def plan(
    model: options.ModelRef = options.DEFAULT_MODEL,
    prompt: Annotated[int, Option(minimum=1, help="Prompt length in tokens.")] = 512,
    json: options.Json = False,
    *,
    engine: options.EngineSettings,
) -> None:
    """Forecast whether a model fits in memory and how fast it will be, without loading it.

      penstock plan ./model.gguf
      penstock plan ./Llama-3.1-8B-Instruct --quantize fp8 --max-len 8192 --prompt 2000
      penstock plan ./model.gguf --adapter pirate=./pirate --json

    Speeds are computed from measurements of this machine (see penstock doctor); expect them within 25 % on an otherwise
    idle machine. The exit code is 1 if the model does not fit; the error names the shortage and ways to fix it.
    """
    path = obtain(model, MemoryAdvisor(engine))

    from penstock.backend import resolve_defaults
    from penstock.config import configure
    from penstock.engine.kv_disk.summary import described, summarize
    from penstock.errors import ConfigError
    from penstock.model.load import open_checkpoint
    from penstock.planning.forecast import make_forecasts
    from penstock.planning.kv_guard import kept_loss
    from penstock.store import with_local_draft

    config = with_local_draft(configure(path, engine), obtain)
    checkpoint = open_checkpoint(path, config.config, config.strict_config, config.max_len)
    found, *others = make_forecasts(config, checkpoint, prompt, machine_profile)
    loss = kept_loss(resolve_defaults(config), checkpoint)
    if json:
        disk = summarize(Path(config.kv_disk).expanduser())._asdict() if config.kv_disk else None
        quantized = {other.quantize: _to_json(other) for other in others}
        print_json(_to_json(found) | {"kv_disk": disk, "kv_loss": loss and loss._asdict(), "quantized": quantized})
    elif found.memory:
        _print_lines(found.memory.lines())
        if config.kv_disk:
            print_filled(described(config.kv_disk, config.kv_disk_bytes), f"  {'KV on disk':<18}")
        if loss:
            print_filled(str(loss), f"  {'KV in ' + config.kv:<18}")
        _print_lines(_speed_lines(found.speed))
        if found.speed and found.profile and is_busy(found.profile):
            print_filled(busy_text(found.profile), "  note: ")
    if others and not json:
        _print_table([found, *others])
    if found.problem:
        fitting = [other.quantize for other in others if other.memory]
        advice = f"; it would fit with --quantize {' or '.join(fitting)}" if fitting else ""
        raise ConfigError(found.problem + advice)


def _to_json(forecast: Forecast) -> dict[str, Any]:
    memory, speed = forecast.memory, forecast.speed
    if memory is None:
        return {"fits": False, "trouble": forecast.problem}
    fields = {**memory.footprint._asdict(), "cache": memory.cache, "kv_ram": memory.kv_ram}
    fields |= {"adapters": memory.adapters}
    fields |= {**memory.limits._asdict(), "notes": memory.notes}
    busy = forecast.profile.busy if forecast.profile else None  # share of other processes during the measurement
    return {"fits": True} | fields | {"speed": speed and speed._asdict(), "machine_busy": busy}


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print_filled(line, after=2 if line.startswith("  note:") else REMARKS)


def _speed_lines(speed: Speed | None) -> list[str]:
    if speed is None:
        return []
    prompt = f"for a prompt of {speed.prompt:,} tokens ({speed.prompt / speed.first_token:,.0f} tok/s)"
    return [
        "expected speed",
        f"  {'first token' if speed.together else 'embedding':<18}{speed.first_token:>8.3g} s   {prompt}",
        *(
            f"  {'1 sequence' if count == 1 else f'{count} sequences':<18}{total:>8,.0f} tok/s"
            + (f"   {total / count:,.0f} each" if count > 1 else "")
            for count, total in speed.together.items()
        ),
    ]


def _print_table(forecasts: Sequence[Forecast]) -> None:
    from rich.table import Column, Table

    right = [Column(name, justify="right") for name in ("weights", "context", "sequences", "first token", "tok/s")]
    table = Table("--quantize", *right, box=None, pad_edge=False)
    for forecast in forecasts:
        memory, speed = forecast.memory, forecast.speed
        if memory is None:
            table.add_row(forecast.quantize or "(none)", "does not fit")
            continue
        table.add_row(
            forecast.quantize or "(none)",
            readable_size(memory.footprint.weights),
            f"{memory.limits.max_len:,}",
            f"{memory.whole_sequences:,}",
            f"{speed.first_token:.3g} s" if speed else "",
            f"{speed.alone:,.0f}" if speed and speed.alone else "",
        )
    print_table(table)
