"""Does it fit, and how fast will it be?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from penstock.cli import options
from penstock.cli.command import Option
from penstock.cli.machine_profile import measured
from penstock.cli.terminal import obtain, print_json, print_table, readable_size

if TYPE_CHECKING:
    from penstock.planning.forecast import Outlook, Speed


def plan(
    model: options.Model = options.DEFAULT_MODEL,
    prompt: Annotated[int, Option(minimum=1, help="Tokens of the prompts to expect.")] = 512,
    json: options.Json = False,
    *,
    engine: options.Engine,
) -> None:
    """Tell whether a model fits, at which precision, and how fast it will be; nothing is loaded.

    penstock plan ./model.gguf
    penstock plan ./Llama-3.1-8B-Instruct --quantize fp8 --max-len 8192 --prompt 2000
    penstock plan ./model.gguf --json

    Speeds are what the machine's own rates, measured once (penstock doctor), make of the model: expect them within a
    quarter while nothing else runs. Leaves with 1 when it would not fit, and says what is missing and what would help.
    """
    path = obtain(model)

    from penstock.config import configure
    from penstock.errors import ConfigError
    from penstock.model.load import open_checkpoint
    from penstock.planning.forecast import outlooks

    config = configure(path, engine)
    found, *others = outlooks(config, open_checkpoint(path), prompt, measured)
    if json:
        print_json(_fields(found) | {"quantized": {other.quantize: _fields(other) for other in others}})
    elif found.memory:
        print("\n".join(found.memory.lines()))
        print("\n".join(_speeds(found.speed)))
    if others and not json:
        _print_others([found, *others])
    if found.trouble:
        fitting = [other.quantize for other in others if other.memory]
        raise ConfigError(found.trouble + (f"; it would fit with --quantize {' or '.join(fitting)}" if fitting else ""))


def _fields(outlook: Outlook) -> dict[str, Any]:
    memory, speed = outlook.memory, outlook.speed
    if memory is None:
        return {"fits": False, "trouble": outlook.trouble}
    fields = {**memory.footprint._asdict(), "cache": memory.cache, **memory.limits._asdict(), "notes": memory.notes}
    return {"fits": True} | fields | {"speed": speed and speed._asdict()}


def _speeds(speed: Speed | None) -> list[str]:
    if speed is None:
        return []
    prompt = f"of a prompt of {speed.prompt:,} tokens ({speed.prompt / speed.first_token:,.0f} tok/s)"
    return [
        "to be expected",
        f"  {'first token' if speed.together else 'an embedding':<18}{speed.first_token:>8.3g} s   {prompt}",
        *(
            f"  {'one sequence' if count == 1 else f'{count} sequences':<18}{total:>8,.0f} tok/s"
            + (f"   {total / count:,.0f} each" if count > 1 else "")
            for count, total in speed.together.items()
        ),
    ]


def _print_others(outlooks: Sequence[Outlook]) -> None:
    from rich.table import Column, Table

    right = [Column(name, justify="right") for name in ("weights", "context", "sequences", "first token", "tok/s")]
    table = Table("--quantize", *right, box=None, pad_edge=False)
    for outlook in outlooks:
        memory, speed = outlook.memory, outlook.speed
        if memory is None:
            table.add_row(outlook.quantize or "as it is", "does not fit")
            continue
        table.add_row(
            outlook.quantize or "as it is",
            readable_size(memory.footprint.weights),
            f"{memory.limits.max_len:,}",
            f"{memory.whole_sequences:,}",
            f"{speed.first_token:.3g} s" if speed else "",
            f"{speed.alone:,.0f}" if speed and speed.alone else "",
        )
    print_table(table)
