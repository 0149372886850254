"""Does it fit?"""

from __future__ import annotations

from penstock.cli import options
from penstock.cli.terminal import obtain, print_json


def plan(
    model: options.Model = options.DEFAULT_MODEL,
    device: options.Device = "auto",
    max_len: options.MaxLen = 0,
    max_rows: options.MaxRows = 0,
    step_tokens: options.StepTokens = 0,
    quantize: options.Quantize = "",
    kv: options.Kv = "auto",
    kv_memory: options.KvMemory = 0,
    json: options.Json = False,
) -> None:
    """Tell what memory a model would take; nothing is loaded.

    penstock plan ./model.gguf
    penstock plan ./Llama-3.1-8B-Instruct --quantize fp8 --max-len 8192 --json

    Leaves with 1 when it would not fit, and says what is missing and what would help.
    """
    path = obtain(model)

    from penstock.backend import open_backend, settle
    from penstock.config import Config
    from penstock.engine.plan import plan_memory
    from penstock.model.load import open_checkpoint

    checkpoint = open_checkpoint(path)
    config = settle(
        Config(
            model=str(path),
            device=device,
            max_len=max_len,
            max_rows=max_rows,
            max_tokens=step_tokens,
            quantize=quantize,
            kv=kv,
            kv_memory=kv_memory,
        ),
        checkpoint.float8,
    )
    tensors = checkpoint.tensors.values()
    found = plan_memory(config, checkpoint.spec, open_backend(config).footprint(checkpoint.spec, tensors))
    if json:
        print_json({**found.footprint._asdict(), "cache": found.cache, **found.limits._asdict(), "notes": found.notes})
    else:
        print("\n".join(found.lines()))
