"""Translates other engines' flags: renames equivalent ones, reports those without effect, and suggests alternatives."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from itertools import takewhile
from typing import NamedTuple

from penstock.cli.framework.command import UsageError

RENAMED = {
    "--max-model-len": "--max-len",  # vLLM
    "--served-model-name": "--name",
    "--max-num-seqs": "--max-rows",
    "--max-num-batched-tokens": "--step-tokens",
    "--kv-cache-dtype": "--kv",
    "--quantization": "--quantize",
    "--kv-cache-memory-bytes": "--kv-memory",
    "--context-length": "--max-len",  # SGLang
    "--max-running-requests": "--max-rows",
    "--ctx-size": "--max-len",  # llama.cpp
    "-c": "--max-len",
    "--parallel": "--max-rows",
    "-np": "--max-rows",
    "--batch-size": "--step-tokens",
    "-b": "--step-tokens",
    "--ubatch-size": "--step-tokens",
    "-ub": "--step-tokens",
    "-a": "--name",
    "-t": "--threads",
    "--predict": "--max-tokens",
    "--n-predict": "--max-tokens",
    "-n": "--max-tokens",
    "--max-new-tokens": "--max-tokens",
    "--temp": "--temperature",
    "--repeat-penalty": "--repetition-penalty",
    "-s": "--seed",
    "--system-prompt": "--system",
    "-sys": "--system",
    "--draft-max": "--speculation",
}
AS_MODEL = {"--model": "", "-m": "", "--model-path": "", "-hf": "hf:", "-hfr": "hf:", "--hf-repo": "hf:"}  # prefixes
SEVERAL_NAMES = "--served-model-name"  # vLLM takes all words up to the next flag
AS_PROMPT = ("-p", "--prompt")
SWITCH = ("on", "off", "auto", "0", "1")
# flag: its number of values or its allowed values, and the reason
NO_EFFECT: dict[str, tuple[int | tuple[str, ...], str]] = {
    "--enable-prefix-caching": (0, "prefixes are always cached"),
    "--enable-chunked-prefill": (0, "long prompts are always computed in chunks"),
    "--enforce-eager": (0, "the engine decides when it captures graphs"),
    "--trust-remote-code": (0, "no code of a model is ever run"),
    "--disable-log-requests": (0, "prompts are never logged"),
    "--disable-log-stats": (0, "statistics are at /metrics, not in the log"),
    "--task": (1, "the model's files define this"),
    "--runner": (1, "the model's files define this"),
    "--enable-auto-tool-choice": (0, "tool calls are always parsed"),
    "--tool-call-parser": (1, "the parser is found by the model's template"),
    "--reasoning-parser": (1, "reasoning is found by the model's template"),
    "--dtype": (1, "weights are computed with as they are stored; see --quantize"),
    "--jinja": (0, "chat templates are always rendered"),
    "--flash-attn": (SWITCH, "attention is always computed in tiles"),
    "-fa": (SWITCH, "attention is always computed in tiles"),
    "--cont-batching": (0, "requests are always batched continuously"),
    "-cb": (0, "requests are always batched continuously"),
    "--mlock": (0, "the system decides what stays in memory"),
    "--no-mmap": (0, "weights are mapped or read as suits the format"),
    "-no-cnv": (0, "run answers one prompt; chat has conversations"),
    "--metrics": (0, "metrics are always at /metrics"),
    "--slots": (0, "/slots is always there"),
    "--embedding": (0, "every model makes embeddings"),
    "--embeddings": (0, "every model makes embeddings"),
    "--reranking": (0, "a reranker is known by its files"),
    "--no-context-shift": (0, "nothing is ever shifted out of the context"),
}
TOLD = {  # the equivalent to write
    "--api-key": "make a key with `penstock keys add NAME`, then serve with --keys FILE",
    "--n-gpu-layers": "a model is wholly on one device: write --device cuda or --device cpu",
    "--tensor-parallel-size": "a model is on one GPU: write --device cuda:N",
    "--gpu-memory-utilization": "write the bytes of the KV cache with --kv-memory, or of all models with --memory",
    "--mem-fraction-static": "write the bytes of the KV cache with --kv-memory, or of all models with --memory",
    "--lora": "write --adapter NAME=PATH",
    "--cache-type-k": "write --kv int8 for both keys and values, or --kv int8:int4 for each",
    "--mmproj": "images are not supported",
    "--enable-deterministic-inference": "write --deterministic",
    "--no-enable-prefix-caching": "prefixes are always cached",
    "--swap-space": "write the bytes of host memory with --kv-ram, such as 4G",
    "--data-parallel-size": "copies of a model are a fleet: write penstock fleet serve --replicas N",
    "--hf-overrides": "write --config KEY=VALUE for each field",
    "--ssl-keyfile": "put a proxy with TLS before the server",
    "--context-shift": "nothing is shifted out of the context: write a larger --max-len",
    "--rope-scaling": "RoPE is the model's own; --config KEY=VALUE changes it in a folder's config.json",
}
TOLD |= {"-ngl": TOLD["--n-gpu-layers"], "--gpu-layers": TOLD["--n-gpu-layers"], "-ctk": TOLD["--cache-type-k"]}
TOLD |= dict.fromkeys(("--cache-type-v", "-ctv"), TOLD["--cache-type-k"])
TOLD |= {"--tp": TOLD["--tensor-parallel-size"], "-tp": TOLD["--tensor-parallel-size"]}
TOLD |= dict.fromkeys(("--cpu-offload-gb", "--cpu-moe", "--n-cpu-moe", "-ncmoe", "-ot"), TOLD["--n-gpu-layers"])
TOLD |= {"--override-tensor": TOLD["--n-gpu-layers"], "--rope-freq-base": TOLD["--rope-scaling"]}
TOLD |= {"--cache-ram": TOLD["--swap-space"], "-cram": TOLD["--swap-space"], "-dp": TOLD["--data-parallel-size"]}
TOLD |= dict.fromkeys(("--ssl-certfile", "--ssl-key-file", "--ssl-cert-file"), TOLD["--ssl-keyfile"])


class KnownFlags(NamedTuple):
    """Lists a command's flags with and without a value."""

    valued: Collection[str]
    bare: Collection[str]


class Translated(NamedTuple):
    """Holds a translated command line, and messages about it."""

    words: list[str]
    notes: list[str]
    wrong: list[str]  # unknown flags


def translate(words: Sequence[str], known: KnownFlags) -> Translated:
    """Translates other engines' flags. Raises UsageError that lists all unknown flags with the nearest names."""
    result = Translated([], [], [])
    rest = list(words)
    has_model = any(word.partition("=")[0] in AS_MODEL for word in words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            result.words.extend([word, *rest])
            break
        flag, equals, value = word.partition("=")
        if not flag.startswith("-") or flag == "-" or _is_number(flag):
            result.words.append(word)
            has_model = True
        elif flag == SEVERAL_NAMES and has_model and not equals:
            del rest[: _translate_names(rest, known, result)]
        elif flag in known.bare or flag in known.valued:
            result.words.append(word)
            if flag in known.valued and not equals and rest:
                result.words.append(rest.pop(0))
        else:
            _translate(flag, [value, *rest] if equals else rest, known, result)
            if equals:
                continue
            del rest[: _values(flag, rest)]
    if result.wrong:
        raise UsageError("; ".join(result.wrong))
    return result


def _translate_names(rest: Sequence[str], known: KnownFlags, result: Translated) -> int:
    """Adds names of an already named model: its own name, then aliases. Returns the number of words used."""
    names = list(takewhile(lambda word: not word.startswith("-"), rest))
    _translate(SEVERAL_NAMES, names, known, result)
    for alias in names[1:]:
        result.words.extend(["--alias", f"{alias}={names[0]}"])
    return len(names)


def _translate(flag: str, values: Sequence[str], known: KnownFlags, result: Translated) -> None:
    own = RENAMED.get(flag, "")
    if own in known.valued:
        result.words.extend([own, *values[:1]])
        result.notes.append(f"{flag} is called {own} here")
    elif own:
        result.wrong.append(f"{flag} is called {own} here, and this command does not have it")
    elif flag in AS_MODEL and values:
        model = values[0] if values[0].startswith(AS_MODEL[flag]) else AS_MODEL[flag] + values[0]
        result.words.insert(0, model)
    elif flag in AS_PROMPT and values:
        result.words.append(values[0])
    elif flag in NO_EFFECT:
        result.notes.append(f"{flag} has no effect: {NO_EFFECT[flag][1]}")
    elif flag in TOLD:
        result.wrong.append(f"{flag} is not an option here: {TOLD[flag]}")
    else:
        near = get_close_matches(flag, [*known.valued, *known.bare], n=2, cutoff=0.7)
        result.wrong.append(f"there is no option {flag}" + (f", did you mean {' or '.join(near)}?" if near else ""))


def _values(flag: str, rest: Sequence[str]) -> int:
    """Returns the number of values of another engine's flag. An unknown flag has one value, unless a flag follows
    it.
    """
    takes = NO_EFFECT[flag][0] if flag in NO_EFFECT else 1
    if flag not in (*NO_EFFECT, *RENAMED, *AS_MODEL, *AS_PROMPT) and rest and rest[0].startswith("--"):
        return 0
    if isinstance(takes, tuple):
        return int(bool(rest) and rest[0] in takes)
    return min(takes, len(rest))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
