"""Defines the configuration that all tiers share.

Each option of the engine is one field of `Config`. Its name is the keyword of `LLM` and, with dashes, the flag of the
command line. Flags, `--help` and docs/cli.md are generated from these declarations.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from operator import index
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from penstock.config.values import EXAMPLES, read_bytes, read_kv, read_kv_loss
from penstock.errors import ConfigError
from penstock.system.printing import escaped_json, print_to_stderr

AUTO, OFF = "auto", "off"  # option values
LOG_FORMAT = "PENSTOCK_LOG_FORMAT"  # the server's log format, inherited by its processes
SHAPES, TOKENS = "shapes", "tokens"  # request contents in a post-mortem bundle
MTP = "mtp"  # the value of draft for a head in the model's own checkpoint
T = TypeVar("T")


class ConfigOption(NamedTuple):
    """Describes one field of `Config` to users, and checks its values. Where 0 means a value that depends on the
    device, or the values are devices, `backend.devices.option_help` completes the help."""

    help: str
    minimum: int = 0
    maximum: int | None = None
    older: tuple[str, ...] = ()  # former names, still accepted
    in_bytes: bool = False  # a number of bytes, or text with a unit
    read: Callable[[Any], Any] | None = None  # parses values that are not plain numbers or texts

    def check(self, name: str, value: Any, kind: type) -> Any:
        """Returns the value as a `kind` (int, bool, str, or tuple of texts); raises ConfigError if it is not one or out
        of range.
        """
        if self.read is not None:
            return self.read(value)
        if kind is tuple:
            texts = (value,) if isinstance(value, str) else tuple(value or ())
            return tuple(self.check(name, text, str) for text in texts)
        if kind is bool:
            if not isinstance(value, bool):
                raise ConfigError(f"{name} takes True or False; got {value!r}")
            return value
        if kind is str:
            if not isinstance(value, str):
                raise ConfigError(f"{name} takes a text; got {value!r}")
            return value
        try:
            number = read_bytes(value) if self.in_bytes and isinstance(value, str) else index(value)
        except (TypeError, ValueError):
            what = f"a number of bytes, such as {EXAMPLES}" if self.in_bytes else "a whole number"
            raise ConfigError(f"{name} takes {what}; got {value!r}") from None
        if number < self.minimum or (self.maximum is not None and number > self.maximum):
            allowed = f"{self.minimum} or more" if self.maximum is None else f"from {self.minimum} to {self.maximum}"
            raise ConfigError(f"{name} must be {allowed}; got {number}")
        return number


def option(default: T, help: str, **described: Any) -> T:
    """Declares a field of `Config` that users may set."""
    return field(default=default, metadata={"option": ConfigOption(help, **described)})


def read_post_mortem(value: Any) -> str:
    if value not in (SHAPES, TOKENS, OFF):
        raise ConfigError(f"post_mortem is one of {SHAPES}, {TOKENS} and {OFF}; got {value!r}")
    return str(value)


def read_speculation(value: Any) -> str:
    """Normalizes a value of `--speculation`: auto, off, or a positive integer; raises ConfigError if invalid."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if text in (AUTO, OFF):
        return text
    if isinstance(text, str) and text.isascii() and text.isdigit():
        return str(int(text)) if int(text) else OFF
    raise ConfigError(f"speculation is {AUTO}, {OFF}, or the most tokens that a step may draft; got {value!r}")


def read_kv_ram(value: Any) -> str:
    """Normalizes a value of `--kv-ram`: auto, or a number of bytes; raises ConfigError if invalid."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    try:
        return AUTO if text == AUTO else str(read_bytes(text))
    except (TypeError, ValueError, AttributeError):
        raise ConfigError(f"kv_ram is {AUTO}, or bytes such as {EXAMPLES}, 0 for none; got {value!r}") from None


def draft_limit(speculation: str) -> int | None:
    """Returns the most drafted tokens per step and answer from `read_speculation`'s result; None: no fixed limit."""
    return None if speculation == AUTO else 0 if speculation == OFF else int(speculation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Defines the model and how it runs. Users' values come through `configure`, which checks them."""

    model: str  # a GGUF file or a Hugging Face folder
    name: str = ""  # clients' name for the model; empty: from the file
    max_len_for_all: bool = False  # max_len is shared by several models, and a shorter context takes precedence
    yielding: bool = False  # loads weights at low priority on a CPU
    grammars_wait: bool = False  # requests with grammars wait for this engine
    kv_file: str = ""  # memory file of a CPU's KV cache or a GPU's KV ledger, which the next engine inherits
    descriptors: str = ""  # address of the store that keeps a GPU's memory for the next engine
    standby: bool = False  # loads the model and waits to take over another engine's KV cache
    offers: tuple[str, ...] = ()  # endpoints that offer KV blocks to other engines: shm, tcp:HOST:PORT
    listen: str = ""  # address for several clients; ipc://*: in the folder of the engine's socket
    secret: str = ""  # required from joining clients
    device: str = option("auto", "Device that computes.")
    threads: int = option(0, "CPU threads for computation. 0: one per core available to this process.")
    max_len: int = option(
        0,
        "Maximum tokens of one sequence, prompt and answer together. 0: the model's context length. In a server of "
        "several models, a shorter context takes precedence.",
    )
    max_rows: int = option(0, "Maximum sequences computed in one step; further requests wait.")
    step_tokens: int = option(
        0,
        "Maximum tokens computed in one step, of prompts and answers together.",
        older=("max_tokens",),
    )
    prefill_budget: int = option(
        0,
        "Maximum tokens computed in one step while up to 64 sequences decode; each further 64 add half as much, and "
        "prompts of more than 16 such steps take larger ones. Steps shrink to meet the default ITL target (see "
        "--itl-target), unless this equals step_tokens. A lower value shortens the inter-token latency, a higher one "
        "the time to first token.",
        older=("mixed_tokens",),
    )
    quantize: str = option(
        "", "Format to which plain weights (f32, f16, bf16) are quantized at load: q8_0, q4_k, int4 or, on a GPU, fp8."
    )
    kv: str = option(
        "auto",
        "Format of the KV cache: auto (f16, on a GPU bf16), int8, int4, f32 (CPU only) or fp8 (GPU only). int8:int4 "
        "sets the formats of keys and values separately. int8 and fp8 take half the memory of auto, and int8 is more "
        "precise than fp8; int4 takes little more than a quarter, and loses far less precision on values than on "
        "keys.",
        read=read_kv,
    )
    kv_loss: str = option(
        "0.05",
        "Maximum loss of a KV cache with fewer than 16 bits, as mean KL divergence in nats from 16-bit predictions. "
        "It is measured at the first load of a model, on a short text; beyond this bound the model is refused. any: "
        "no bound.",
        read=read_kv_loss,
    )
    kv_memory: int = option(
        0,
        "Bytes for the KV cache, such as 8G. 0: a quarter of the free memory; on a GPU, all memory that the weights "
        "leave.",
        in_bytes=True,
    )
    kv_ram: str = option(
        AUTO,
        "Bytes of host memory, such as 8G, for evicted KV blocks; they are copied back where that is faster than "
        "recomputing them. 0: none. auto: as much as the cache, up to an eighth of the free memory; on a GPU without "
        "--kv-disk, none.",
        read=read_kv_ram,
    )
    kv_disk: str = option(
        "",
        "Folder that keeps the KV of prompts across restarts. Empty: none. Anyone who can read the folder can read "
        "the prompts.",
    )
    kv_disk_bytes: int = option(
        16 << 30,
        "Maximum bytes in the folder of --kv-disk, for all models together. The least recently used files are deleted "
        "first.",
        minimum=1 << 20,
        in_bytes=True,
    )
    block_size: int = option(
        16,
        "Tokens per block of the KV cache. Prefixes are shared in whole blocks, so smaller blocks share more at a "
        "higher overhead. Multiples of 16 are fastest.",
        minimum=1,
        maximum=1024,
    )
    config: tuple[str, ...] = option(
        (), "KEY=VALUE that replaces a field of the folder's config.json; VALUE is JSON. May be repeated."
    )
    adapter: tuple[str, ...] = option(
        (),
        "NAME=PATH[:SCALE] of a LoRA adapter for requests: a PEFT folder or a GGUF file. May be repeated. In a server "
        "of several models it belongs to the first, and MODEL/NAME=PATH[:SCALE] to the named one.",
    )
    max_adapters: int = option(
        32, "Maximum adapters in memory at once; further ones take turns.", minimum=1, maximum=1024
    )
    adapter_memory: int = option(0, "Bytes for adapters in memory. 0: an eighth of the free memory.", in_bytes=True)
    packed_cache: int = option(
        16 << 30,
        "Maximum bytes on disk for packed weights, for all models together. They make later loads faster. The least "
        "recently used are deleted first. 0: none are kept.",
        in_bytes=True,
    )
    strict_config: bool = option(False, "Refuse a config.json with unknown fields.")
    post_mortem: str = option(
        "shapes",
        "Contents of the bundle in PENSTOCK_HOME about the requests of a dead engine: shapes (their lengths), tokens "
        "(all of them) or off (no bundle). The last 8 bundles are kept.",
        read=lambda value: read_post_mortem(value),
    )
    speculation: str = option(
        AUTO,
        "Maximum drafted tokens per step and answer (speculative decoding): auto (as many as pay off, often none), "
        "off, or a number. Answers stay the same.",
        read=read_speculation,
    )
    draft: str = option(
        "",
        "Source of drafts (speculative decoding): a small model with the same vocabulary, by name, or an EAGLE-3 head "
        "for the model, or mtp for the multi-token prediction head in the model's own checkpoint. Answers stay the "
        "same. In a server of several models it belongs to the first.",
    )
    deterministic: bool = option(
        False,
        "Compute an answer independently of other requests and of how its prompt is divided into steps (batch "
        "invariance). CPUs always do so; on a GPU it needs slower kernels.",
    )

    @property
    def draft_model(self) -> str:
        """Returns the draft model; "" if there is none, or if a head of the model drafts."""
        return "" if self.draft == MTP else self.draft


class AdapterOption(NamedTuple):
    """Holds a parsed `--adapter`."""

    name: str
    path: str
    scale: float = 1.0


def parse_adapter(text: str) -> AdapterOption:
    """Parses NAME=PATH[:SCALE], or vLLM's JSON form {"name": ..., "path": ...}."""
    if text.startswith("{"):
        return _adapter_in_json(text)
    name, equals, place = text.partition("=")
    if not (name and equals and place):
        raise ConfigError(f"--adapter takes NAME=PATH[:SCALE]; got {text!r}")
    path, colon, tail = place.rpartition(":")
    try:
        return AdapterOption(name, path, float(tail)) if colon and path else AdapterOption(name, place)
    except ValueError:  # the colon is part of the path
        return AdapterOption(name, place)


def _adapter_in_json(text: str) -> AdapterOption:
    """Parses vLLM's JSON form of an adapter; `base_model_name` has no effect."""
    try:
        match json.loads(text):
            case {"name": str(name), "path": str(path)} if name and path:
                return AdapterOption(name, path)
    except ValueError:
        pass
    raise ConfigError(f'an adapter in JSON is {{"name": "...", "path": "..."}}; got {text!r}')


OPTIONS: dict[str, ConfigOption] = {
    entry.name: entry.metadata["option"] for entry in fields(Config) if "option" in entry.metadata
}
DEFAULTS: dict[str, Any] = {entry.name: entry.default for entry in fields(Config) if entry.name in OPTIONS}
_NEWER = {older: name for name, described in OPTIONS.items() for older in described.older}


def log_to_stderr(line: str, level: str = "info") -> None:
    if os.environ.get(LOG_FORMAT) == "json":
        seconds = time.time()
        when = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(seconds * 1000) % 1000:03}Z"
        told = {"time": when, "level": level, "logger": "penstock", "message": line}
        line = escaped_json(json.dumps(told, ensure_ascii=False))
    print_to_stderr(line)


def configure(
    model: str | Path, settings: Mapping[str, Any], *, name: str = "", log: Callable[[str], None] = log_to_stderr
) -> Config:
    """Returns the config of a model with a user's options. Options under former names are accepted, and `log` gets a
    line about each. Raises ConfigError for unknown options and invalid values.
    """
    unknown = sorted(settings.keys() - OPTIONS.keys() - _NEWER.keys())
    if unknown:
        raise ConfigError(f"unknown options: {', '.join(unknown)}; there are {', '.join(sorted(OPTIONS))}")
    checked: dict[str, Any] = {}
    for given, value in settings.items():
        key = _NEWER.get(given, given)
        if key != given:
            log(f"option {given} is now called {key}; the older name still works")
        if key in checked:
            raise ConfigError(f"option {key} was given twice, once by an older name: give it once")
        checked[key] = OPTIONS[key].check(key, value, type(DEFAULTS[key]))
    config = Config(model=str(model), name=name, **checked)
    if config.step_tokens and config.prefill_budget > config.step_tokens:
        raise ConfigError(
            f"prefill_budget {config.prefill_budget} is more than step_tokens {config.step_tokens}: a step has no room "
            "for it; lower the one or raise the other"
        )
    return config


def available_memory() -> int:
    """Returns the bytes that this process can use without causing swapping, within its control group."""
    return _granted(_system_memory())


def _system_memory() -> int:
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return _windows_memory()[1] if sys.platform == "win32" else total_memory() // 2


def _granted(most: int) -> int:
    """Limits a number of bytes to the control group's memory, as set for containers."""
    return min([most, *(int(limit) for limit in _lines("/sys/fs/cgroup/memory.max") if limit.isdigit())])


def _windows_memory() -> tuple[int, int]:
    import ctypes

    status = (ctypes.c_uint64 * 8)(64)  # MEMORYSTATUSEX: its length and the load in the first, then total, available
    ctypes.WinDLL("kernel32").GlobalMemoryStatusEx(status)  # type: ignore[attr-defined, unused-ignore]
    return status[1], status[2]


def total_memory() -> int:
    """Returns the memory of this machine, within the process's control group."""
    if sys.platform == "win32":
        return _windows_memory()[0]
    return _granted(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def home() -> Path:
    """Returns the store's folder: PENSTOCK_HOME, or `penstock` in the user's cache folder."""
    given = os.environ.get("PENSTOCK_HOME")
    try:
        return Path(given).expanduser().absolute() if given else _user_cache() / "penstock"
    except RuntimeError as error:
        raise ConfigError(f"this user has no home folder ({error}): set PENSTOCK_HOME") from error


def packed_home() -> Path:
    return home() / "packed"


def packed_folder(model: Path) -> Path:
    from hashlib import blake2b

    path = model.resolve()
    return packed_home() / f"{path.name}-{blake2b(bytes(path), digest_size=8).hexdigest()}"


def _user_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def available_threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
