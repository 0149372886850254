"""The one configuration of every tier: what a user may set, said once.

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

from penstock.config.byte_sizes import EXAMPLES, read_bytes
from penstock.config.kv_formats import read_kv, read_kv_loss
from penstock.errors import ConfigError
from penstock.system.printing import escaped_json, print_to_stderr

DEVICES = ("auto", "cpu", "cuda", "ref")  # kinds; of several GPUs, cuda:N is the one with that index
QUANTIZATIONS = {  # what plain weights can become at load, by device; each takes less memory
    "cpu": ("q8_0", "q4_k", "int4"),
    "cuda": ("q8_0", "q4_k", "fp8", "int4"),
}
AUTO, OFF = "auto", "off"  # values of options
LOG_FORMAT = "PENSTOCK_LOG_FORMAT"  # the variable that tells the processes of a server how it logs
SHAPES, TOKENS = "shapes", "tokens"  # of requests that a bundle about a death holds
MTP = "mtp"  # the value of draft that means a head of the model itself
T = TypeVar("T")


class Device(NamedTuple):
    """Names what computes: a kind of device and, of GPUs, which one."""

    kind: str  # one of DEVICES
    index: int = 0  # type: ignore[assignment]  # a device is no one's list: tuple.index is not missed

    @classmethod
    def parse(cls, text: str) -> Device:
        """Reads what `--device` takes; raises ConfigError for anything else."""
        kind, colon, index = text.partition(":")
        if kind not in DEVICES or (colon and not (kind == "cuda" and index.isascii() and index.isdigit())):
            raise ConfigError(f"unknown device {text!r}: use one of {', '.join(DEVICES)}, or cuda:N for GPU number N")
        return cls(kind, int(index or 0))

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}" if self.kind == "cuda" else self.kind


class DeviceDefaults(NamedTuple):
    """Gives the values that stand in for 0 on each kind of device."""

    cpu: int
    cuda: int
    cuda_fp8: int  # on a GPU, for a model with FP8 weights

    def of(self, device: Device, fp8_weights: bool = False) -> int:
        """Returns the value for a device."""
        if device.kind != "cuda":
            return self.cpu
        return self.cuda_fp8 if fp8_weights else self.cuda

    def __str__(self) -> str:
        fp8 = "" if self.cuda_fp8 == self.cuda else f", with FP8 weights {self.cuda_fp8}"
        return f"0: {self.cpu}; on a GPU {self.cuda}{fp8}."


class ConfigOption(NamedTuple):
    """Describes one field of `Config` to users, and checks its values."""

    help: str
    minimum: int = 0
    maximum: int | None = None
    defaults: DeviceDefaults | None = None  # what 0 stands for
    older: tuple[str, ...] = ()  # names that the option had before; they are still read
    in_bytes: bool = False  # its number is of bytes, and may be a text with a unit
    read: Callable[[Any], Any] | None = None  # reads its values, if they are more than numbers or texts

    @property
    def text(self) -> str:
        """Returns the help text with the values that 0 stands for."""
        return f"{self.help} {self.defaults}" if self.defaults else self.help

    def check(self, name: str, value: Any, kind: type) -> Any:
        """Returns the value as a `kind` (int, bool, str, or tuple of texts); raises ConfigError if it is not one or is
        out of range."""
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
    """Returns what `--post-mortem` takes; raises ConfigError for anything else."""
    if value not in (SHAPES, TOKENS, OFF):
        raise ConfigError(f"post_mortem is one of {SHAPES}, {TOKENS} and {OFF}; got {value!r}")
    return str(value)


def read_speculation(value: Any) -> str:
    """Returns what `--speculation` takes as text: auto, off, or a number above 0; raises ConfigError for anything
    else."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if text in (AUTO, OFF):
        return text
    if isinstance(text, str) and text.isascii() and text.isdigit():
        return str(int(text)) if int(text) else OFF
    raise ConfigError(f"speculation is {AUTO}, {OFF}, or the most tokens that a step may draft; got {value!r}")


def read_kv_ram(value: Any) -> str:
    """Returns what `--kv-ram` takes as text: auto, or a number of bytes; raises ConfigError for anything else."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    try:
        return AUTO if text == AUTO else str(read_bytes(text))
    except (TypeError, ValueError, AttributeError):
        raise ConfigError(f"kv_ram is {AUTO}, or bytes such as {EXAMPLES}, 0 for none; got {value!r}") from None


def draft_limit(speculation: str) -> int | None:
    """Returns the most tokens that a step may draft for one answer, by what `read_speculation` returned; 0: none;
    None: as many as pay."""
    return None if speculation == AUTO else 0 if speculation == OFF else int(speculation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Says which model to run and how. Users' values come through `configure`, which checks them."""

    model: str  # a GGUF file or a Hugging Face folder
    name: str = ""  # what clients call it; empty: from the file
    max_len_for_all: bool = False  # max_len is for several models: one with a shorter context has that
    yielding: bool = False  # a CPU loads its weights only as fast as that slows down nobody
    grammars_wait: bool = False  # requests with grammars wait for this engine
    kv_file: str = ""  # that a CPU's KV cache lies in, in memory, so that the next engine finds it; a GPU's ledger, too
    descriptors: str = ""  # the address of the store that keeps a GPU's memory for the next engine
    standby: bool = False  # it loads the model and waits: another engine has the KV cache until that is lost
    offers: tuple[str, ...] = ()  # where it offers KV blocks to other engines: shm, tcp:HOST:PORT
    listen: str = ""  # the address at which several clients may join; ipc://*: in the folder of the engine's socket
    secret: str = ""  # that clients who join have to know
    device: str = option(
        "auto", "Device that computes: auto, cpu, cuda, cuda:N (the GPU with that index) or ref (NumPy, slow)."
    )
    threads: int = option(0, "CPU threads to compute with. 0: one for every core that this process may use.")
    max_len: int = option(
        0,
        "Most tokens of one sequence, prompt and answer together. 0: the model's context length. In a server of "
        "several models, those with a shorter context have that.",
    )
    max_rows: int = option(
        0, "Most sequences computed in one step; further requests wait.", defaults=DeviceDefaults(64, 256, 256)
    )
    step_tokens: int = option(
        0,
        "Most tokens computed in one step, of prompts and answers together.",
        defaults=DeviceDefaults(512, 2048, 2048),
        older=("max_tokens",),
    )
    prefill_budget: int = option(
        0,
        "Most tokens computed in one step while up to 64 sequences decode; every 64 more add half as much again, and a "
        "prompt of more than 16 such steps takes larger ones. Steps compute fewer if that takes longer than the usual "
        "ITL target (see --itl-target), unless this is as much as step_tokens. A lower value shortens the time between "
        "two tokens, a higher one the time to the first token.",
        defaults=DeviceDefaults(192, 384, 640),  # 640 FP8 tokens take no longer than 384 with weights of 16 bits
        older=("mixed_tokens",),
    )
    quantize: str = option(
        "", "Format that plain weights (f32, f16, bf16) are quantized to at load: q8_0, q4_k, int4 or, on a GPU, fp8."
    )
    kv: str = option(
        "auto",
        "Format of the KV cache: auto (f16, on a GPU bf16), int8, int4, f32 (CPU only) or fp8 (GPU only). Two with a "
        "colon are the formats of keys and of values: int8:int4. int8 and fp8 take half the memory of auto, and int8 "
        "is the more precise of the two; int4 takes a little more than a quarter, and costs far less for values than "
        "for keys.",
        read=read_kv,
    )
    kv_loss: str = option(
        "0.05",
        "Most that a KV cache of fewer than 16 bits may cost, as mean KL divergence in nats from predictions with 16 "
        "bits. It is measured at load, once for a model, on a short text; beyond this bound the model is refused. any: "
        "nothing is refused.",
        read=read_kv_loss,
    )
    kv_memory: int = option(
        0,
        "Bytes for the KV cache, such as 8G. 0: a quarter of the free memory; on a GPU all that the weights leave.",
        in_bytes=True,
    )
    kv_ram: str = option(
        AUTO,
        "Bytes of host memory, such as 8G, for KV blocks that have left the cache; they are copied back where that is "
        "faster than computing them again. 0: none. auto: as many as the cache has, and at most an eighth of the free "
        "memory; on a GPU without --kv-disk none.",
        read=read_kv_ram,
    )
    kv_disk: str = option(
        "",
        "Folder for the KV of prompts, so that what was computed before a restart is not computed again. Empty: none. "
        "Prompts can be read from these files by whoever may read the folder.",
    )
    kv_disk_bytes: int = option(
        16 << 30,
        "Most bytes in the folder of --kv-disk, of all models together. The least recently used go first.",
        minimum=1 << 20,
        in_bytes=True,
    )
    block_size: int = option(
        16,
        "Tokens in one block of the KV cache. Prefixes are shared in whole blocks, so smaller blocks share more and "
        "cost more bookkeeping. Multiples of 16 are fastest.",
        minimum=1,
        maximum=1024,
    )
    config: tuple[str, ...] = option(
        (), "KEY=VALUE that replaces a field of the folder's config.json; VALUE is JSON. May be repeated."
    )
    adapter: tuple[str, ...] = option(
        (),
        "NAME=PATH[:SCALE] of an adapter (LoRA) that requests may name: a PEFT folder or a GGUF file. May be repeated. "
        "A server of several models gives it to the first, and MODEL/NAME=PATH[:SCALE] to that one.",
    )
    max_adapters: int = option(
        32, "Most adapters that are in memory at once; further ones take turns.", minimum=1, maximum=1024
    )
    adapter_memory: int = option(0, "Bytes for adapters in memory. 0: an eighth of the free memory.", in_bytes=True)
    packed_cache: int = option(
        16 << 30,
        "Most bytes on disk for packed weights, of all models together. With them a model is loaded sooner the next "
        "time. The least recently used go first. 0: none are kept.",
        in_bytes=True,
    )
    strict_config: bool = option(False, "Refuse a config.json with fields that nothing is known of.")
    post_mortem: str = option(
        "shapes",
        "What a file in PENSTOCK_HOME says about the requests of an engine that has died: shapes (how long they were), "
        "tokens (all of them) or off (there is none). The last 8 are kept.",
        read=lambda value: read_post_mortem(value),
    )
    speculation: str = option(
        AUTO,
        "Tokens that a step may draft for one answer (speculative decoding): auto (as many as pay, often none), off, "
        "or a number for at most so many. Answers stay the same.",
        read=read_speculation,
    )
    draft: str = option(
        "",
        "What drafts (speculative decoding): a small model with the vocabulary of the model itself, named as that is, "
        "or an EAGLE-3 head of it, or mtp for the head in the model's own checkpoint that predicts further "
        "tokens. Answers stay the same. A server of several models gives it to the first.",
    )
    deterministic: bool = option(
        False,
        "Compute an answer alike whatever is computed beside it and however its prompt is divided into steps (batch "
        "invariance). On a CPU that is so in any case; on a GPU it takes slower kernels.",
    )

    @property
    def draft_model(self) -> str:
        """Returns the model that drafts; empty: there is none, or a head of the model itself drafts."""
        return "" if self.draft == MTP else self.draft


class AdapterOption(NamedTuple):
    """Is what `--adapter` says."""

    name: str
    path: str
    scale: float = 1.0


def parse_adapter(text: str) -> AdapterOption:
    """Reads NAME=PATH[:SCALE], or vLLM's JSON form {"name": ..., "path": ...}."""
    if text.startswith("{"):
        return _adapter_in_json(text)
    name, equals, place = text.partition("=")
    if not (name and equals and place):
        raise ConfigError(f"--adapter takes NAME=PATH[:SCALE]; got {text!r}")
    path, colon, tail = place.rpartition(":")
    try:
        return AdapterOption(name, path, float(tail)) if colon and path else AdapterOption(name, place)
    except ValueError:  # a colon of the path itself
        return AdapterOption(name, place)


def _adapter_in_json(text: str) -> AdapterOption:
    """Reads vLLM's JSON form of an adapter; `base_model_name` has no effect."""
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
    """Writes a line to stderr: as it is, or as JSON where the server that this process belongs to logs so."""
    if os.environ.get(LOG_FORMAT) == "json":
        seconds = time.time()
        when = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(seconds * 1000) % 1000:03}Z"
        told = {"time": when, "level": level, "logger": "penstock", "message": line}
        line = escaped_json(json.dumps(told, ensure_ascii=False))
    print_to_stderr(line)


def configure(
    model: str | Path, settings: Mapping[str, Any], *, name: str = "", log: Callable[[str], None] = log_to_stderr
) -> Config:
    """Returns the config of a model with the options that a user set. Options by an older name are read too, and `log`
    gets a line about each. Raises ConfigError for unknown options and for values that cannot be."""
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
    """Returns the bytes that this process can take without making others swap, within its control group."""
    return _granted(_system_memory())


def _system_memory() -> int:
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return _windows_memory()[1] if sys.platform == "win32" else total_memory() // 2


def _granted(most: int) -> int:
    """Returns how many of these bytes the control group may take: that of a container may be limited."""
    return min([most, *(int(limit) for limit in _lines("/sys/fs/cgroup/memory.max") if limit.isdigit())])


def _windows_memory() -> tuple[int, int]:
    """Returns the bytes of memory that Windows has, and how many of them are available."""
    import ctypes

    status = (ctypes.c_uint64 * 8)(64)  # MEMORYSTATUSEX: its length and the load in the first, then total, available
    ctypes.WinDLL("kernel32").GlobalMemoryStatusEx(status)  # type: ignore[attr-defined, unused-ignore]
    return status[1], status[2]


def total_memory() -> int:
    """Returns the bytes of memory that this machine has for the control group of this process."""
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
    """Returns the folder of all packed weights."""
    return home() / "packed"


def packed_folder(model: Path) -> Path:
    """Returns the folder of the packed weights of a model file or folder, whether it exists or not."""
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
    """Returns the lines of a system file; none on systems without it."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
