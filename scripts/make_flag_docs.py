"""Writes the tables of flags in docs/moving from what the command line does with other engines' flags; with --check,
only says whether they are current. A flag that the command line knows and no table has is an error."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from generated_blocks import write

from penstock.cli.app import command
from penstock.cli.framework.command import declarations
from penstock.cli.framework.flag_aliases import AS_MODEL, AS_PROMPT, NO_EFFECT, RENAMED, SEVERAL_NAMES, TOLD

FOLDER = Path(__file__).parents[1] / "docs" / "moving"
FLAGS = {  # those of each engine that the command line knows
    "vllm.md": (
        *("--model", "--max-model-len", "--served-model-name", "--max-num-seqs", "--max-num-batched-tokens"),
        *("--kv-cache-dtype", "--quantization", "--host", "--port", "--chat-template", "--lora-modules"),
        *("--speculative-config", "--override-generation-config", "--api-key", "--gpu-memory-utilization"),
        *("--tensor-parallel-size", "-tp", "--enable-prefix-caching", "--enable-chunked-prefill", "--enforce-eager"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "--reasoning-parser", "--dtype", "--trust-remote-code"),
        *("--disable-log-requests", "--disable-log-stats", "--task", "--runner", "--kv-cache-memory-bytes"),
        *("--swap-space", "--cpu-offload-gb", "--data-parallel-size", "-dp", "--hf-overrides"),
        *("--no-enable-prefix-caching", "--ssl-keyfile", "--ssl-certfile"),
    ),
    "sglang.md": (
        *("--model-path", "--context-length", "--max-running-requests", "--mem-fraction-static", "--tp"),
        *(
            "--served-model-name",
            "--kv-cache-dtype",
            "--quantization",
            "--host",
            "--port",
            "--chat-template",
            "--dtype",
        ),
        *("--tool-call-parser", "--reasoning-parser", "--trust-remote-code", "--api-key", "--max-new-tokens"),
        "--enable-deterministic-inference",
    ),
    "llamacpp.md": (
        *("-m", "--model", "-hf", "-hfr", "--hf-repo", "-c", "--ctx-size", "-np", "--parallel", "-b", "--batch-size"),
        *("-ub", "--ubatch-size", "-a", "--top-k", "--min-p", "--repeat-penalty", "-s"),
        *("-t", "--threads", "-n", "--predict", "--n-predict", "--temp", "--top-p", "--seed", "-p", "--prompt"),
        *("-sys", "--system-prompt", "--host", "--port", "--chat-template", "-md", "--model-draft", "--api-key"),
        *("-ngl", "--n-gpu-layers", "--gpu-layers", "--lora", "-ctk", "--cache-type-k", "-ctv"),
        *("--cache-type-v", "--mmproj", "--jinja"),
        *("-fa", "--flash-attn", "-cb", "--cont-batching", "--mlock", "--no-mmap", "-no-cnv"),
        *("--metrics", "--slots", "--embedding", "--embeddings", "--reranking", "--draft-max", "--no-context-shift"),
        *("--context-shift", "--cache-ram", "-cram", "--cpu-moe", "--n-cpu-moe", "-ncmoe", "-ot", "--override-tensor"),
        *("--rope-scaling", "--rope-freq-base", "--ssl-key-file", "--ssl-cert-file"),
    ),
}
TABLES = (RENAMED, AS_MODEL, AS_PROMPT, NO_EFFECT, TOLD)


def flags(page: str) -> str:
    """Returns the table of an engine's flags."""
    rows = [f"| `{flag}` | {meaning(flag)} |" for flag in FLAGS[page]]
    return "\n".join(["| flag | here |", "|---|---|", *rows])


def meaning(flag: str) -> str:
    """Returns what the command line does with a flag."""
    if flag == SEVERAL_NAMES:
        return f"understood: `{RENAMED[flag]}`; a second name is `--alias`"
    if flag in RENAMED:
        return f"understood: `{RENAMED[flag]}`"
    if flag in AS_MODEL:
        return f"understood: the model is the first argument{', as `hf:owner/repo`' if AS_MODEL[flag] else ''}"
    if flag in AS_PROMPT:
        return "understood: the prompt is an argument"
    if flag in NO_EFFECT:
        return f"accepted without effect: {NO_EFFECT[flag][1]}"
    if flag in TOLD:
        return f"refused: {TOLD[flag]}"
    if flag not in own_flags():
        sys.exit(f"{flag} is no flag here, and nothing is said about it: take it out of {__file__}")
    return "the same"


def own_flags() -> set[str]:
    """Returns the flags that the commands declare themselves."""
    declared = [entry for name in ("serve", "run") for entry in declarations(command(name))]
    return {entry.spelling for entry in declared} | {getattr(entry.annotation, "short", "") for entry in declared}


def check() -> None:
    """Ends the program if a flag that the command line knows is in no table."""
    missing = {flag for table in TABLES for flag in table} - {flag for known in FLAGS.values() for flag in known}
    if missing:
        sys.exit(f"{', '.join(sorted(missing))}: add them to the engine that has them, in {__file__}")


if __name__ == "__main__":
    check()
    write({FOLDER / page: {"flags": partial(flags, page)} for page in FLAGS}, Path(__file__).name)
