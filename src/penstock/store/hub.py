"""Downloads models from Hugging Face with its own client, whose token, endpoint and proxy settings apply."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from penstock.errors import DownloadError, ModelNotFound, PenstockError
from penstock.store.paths import sha256_of, size_of
from penstock.store.progress import Progress, watching
from penstock.store.refs import HubRepo

_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")

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
)


def download(source: HubRepo, folder: Path, progress: Progress) -> Path:
    """Downloads the model's files into `folder`, which then has nothing else, and returns the model's path. It resumes
    what an earlier attempt left there."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    folder.mkdir(parents=True, exist_ok=True)
    with _download_errors(source):
        repo = HfApi().model_info(source.repo, files_metadata=True)
        files = [file for file in repo.siblings or [] if _wanted(file.rfilename, source)]
        _check_found(source, files, [file.rfilename for file in repo.siblings or []])
        total = sum(file.size or 0 for file in files)
        with watching(partial(size_of, folder), f"downloading {source}", total, progress):
            for file in files:
                hf_hub_download(source.repo, file.rfilename, revision=repo.sha, local_dir=folder)
    for file in files:
        _check_sum(folder / file.rfilename, file.lfs)
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return folder / source.file if source.file else folder


def _wanted(name: str, source: HubRepo) -> bool:
    if source.file:
        return name == source.file or are_shards(name, source.file)
    return "/" not in name and any(fnmatchcase(name, pattern) for pattern in NEEDED)


def are_shards(name: str, other: str) -> bool:
    """Returns whether two files are shards of one GGUF model, such as `model-00001-of-00003.gguf`."""
    one, another = _SHARD.fullmatch(name), _SHARD.fullmatch(other)
    return one is not None and another is not None and one.groups() == another.groups()


def _check_found(source: HubRepo, files: list[Any], names: list[str]) -> None:
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    choice = f"; its GGUF files are {', '.join(ggufs[:12])}" if ggufs else ""
    if source.file and not files:
        raise ModelNotFound(f"{source.repo} has no file {source.file}{choice}")
    if not source.file and not any(file.rfilename.endswith(".safetensors") for file in files):
        raise ModelNotFound(f"{source.repo} has no safetensors weights{choice}")


def _check_sum(path: Path, lfs: Any) -> None:
    if lfs is not None and sha256_of(path) != lfs.sha256:
        path.unlink()
        raise DownloadError(f"{path.name} does not have the SHA-256 that its repository states: pull again")


@contextmanager
def _download_errors(source: HubRepo) -> Iterator[None]:
    """Turns the client's errors into ours."""
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

    try:
        yield
    except (PenstockError, KeyboardInterrupt):
        raise
    except (RepositoryNotFoundError, EntryNotFoundError) as error:
        raise ModelNotFound(f"{source} does not exist, or needs a token (HF_TOKEN): {_first_line(error)}") from error
    except Exception as error:  # the client's HTTP library and its errors differ between versions
        raise DownloadError(f"{source} could not be fetched: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
