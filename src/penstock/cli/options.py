"""Arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated

from penstock.cli.command import Argument, Option

DEFAULT_MODEL = "smollm2"  # as in penstock.store, which is too heavy to import for --help

Model = Annotated[str, Argument(metavar="MODEL", help="A name, a path, hf:owner/repo[/file] or pypi:package/file.")]
Device = Annotated[str, Option(help="What computes: auto, cpu, cuda or ref (NumPy, slow).")]
Threads = Annotated[int, Option(least=0, help="Threads to compute with; 0: every core this process may use.")]
Kv = Annotated[
    str,
    Option(
        help="What the KV cache holds: auto (f16, on a GPU bf16), int8, f32 (CPU alone) or fp8 (GPU alone). int8 and "
        "fp8 take half the memory; int8 is the more precise."
    ),
]
Quantize = Annotated[
    str, Option(help="Quantizes plain weights (f32, f16, bf16) at load: q8_0, q4_k, int4 or, on a GPU alone, fp8.")
]
MaxLen = Annotated[int, Option(least=0, help="Longest prompt and answer in tokens; 0: the model's own context.")]
MaxRows = Annotated[int, Option(least=0, help="Requests computed at once; more wait. 0: 64, on a GPU 256.")]
StepTokens = Annotated[int, Option(least=0, help="Tokens computed in one step. 0: 512, on a GPU 2048.")]
KvMemory = Annotated[
    int, Option(least=0, help="Bytes for the KV cache; 0: a quarter of what is free, on a GPU all of it.")
]
MaxTokens = Annotated[int | None, Option(least=1, help="Longest answer in tokens; by default, to the context's end.")]
TopP = Annotated[float, Option(least=0, most=1, help="Sample from the likeliest tokens that make up this share.")]
Seed = Annotated[int | None, Option(help="Makes sampling repeatable.")]
System = Annotated[str, Option(help="A system message to begin with.")]
Json = Annotated[bool, Option(help="Print JSON.")]
