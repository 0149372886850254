"""Copies a hub's model without its weights: file headers are fetched, and the rest of each file is a hole. A reader of
headers, such as a memory plan, cannot distinguish the copy from the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.errors import DownloadError

GGUF_HEADER = 24 << 20  # bytes, at most; includes the vocabulary
SHARD_HEADER = 2 << 20  # later shards of a GGUF file, which only have tensors
SAFETENSORS_HEADER = 1 << 20  # usually enough; the file states its length
LONGEST = 128 << 20  # bytes; larger headers and JSON files are rejected
LENGTH = 8  # bytes of a safetensors file's header length
ANSWER = 30.0  # timeout of the hub in seconds


def write_outline(repo: str, revision: str, names: Sequence[str], sizes: Mapping[str, int], folder: Path) -> Path:
    """Writes the copy into a folder; returns the path of its first GGUF file, or the folder."""
    for name in names:
        size = sizes[name]
        if name.endswith(".gguf"):
            head = _fetch(repo, revision, name, min(size, GGUF_HEADER if name == names[0] else SHARD_HEADER))
        elif name.endswith(".safetensors"):
            head = _safetensors_header(repo, revision, name, size)
        elif name.endswith(".json") and "tokenizer" not in name:
            head = _fetch(repo, revision, name, min(size, LONGEST))
        else:
            continue
        _write(_inside(folder, name), head, size)
    return folder / names[0] if names[0].endswith(".gguf") else folder


def _safetensors_header(repo: str, revision: str, name: str, size: int) -> bytes:
    head = _fetch(repo, revision, name, min(size, SAFETENSORS_HEADER))
    end = LENGTH + int.from_bytes(head[:LENGTH], "little")
    return head if end <= len(head) or end > min(size, LONGEST) else _fetch(repo, revision, name, end)


def _inside(folder: Path, name: str) -> Path:
    """Returns the path of a file in the folder; raises if its name leads out of it."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise DownloadError(f"the repository has a file {name!r}, whose name leads out of its folder: do not use it")
    return path


def _write(path: Path, head: bytes, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)


def _fetch(repo: str, revision: str, name: str, count: int) -> bytes:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session  # type: ignore[attr-defined, unused-ignore]

    headers = build_hf_headers() | {"Range": f"bytes=0-{max(count - 1, 0)}", "Accept-Encoding": "identity"}
    answer = get_session().get(hf_hub_url(repo, name, revision=revision), headers=headers, timeout=ANSWER)
    answer.raise_for_status()
    content: bytes = answer.content
    return content[:count]
