"""Reads models split over several GGUF files: name-00001-of-00003.gguf and so on. Any shard may be given.

The first shard has the metadata. Each shard has its number, the number of shards, and the total number of tensors.
"""

from __future__ import annotations

import re
from pathlib import Path

from penstock.errors import MalformedFile, ModelNotFound
from penstock.model.gguf.reader import GgufFile, read_gguf

NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
MAX_SHARDS = 1000


def read_shards(path: Path) -> GgufFile:
    file = read_gguf(path)
    count = file.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= MAX_SHARDS:
        raise MalformedFile(f"{path.name} says it is one of {count!r} shards; at most {MAX_SHARDS} are supported")
    return joined(path, count) if count > 1 else file


def joined(path: Path, count: int) -> GgufFile:
    """Returns the first shard's file with the tensors of all `count` shards."""
    paths = shard_paths(path, count)
    if missing := [shard.name for shard in paths if not shard.exists()]:
        raise ModelNotFound(
            f"{path.name} is one of {count} shards of a model, but there is no {missing[0]} in its folder"
            + (f", and {len(missing) - 1} more shards are missing" if len(missing) > 1 else "")
        )
    files = [read_gguf(shard) for shard in paths]
    for number, (shard, file) in enumerate(zip(paths, files, strict=True)):
        stated = file.metadata.get("split.no"), file.metadata.get("split.count")
        if stated != (number, count):
            raise MalformedFile(f"{shard.name} says split.no and split.count are {stated}, not {(number, count)}")
    first, *others = files
    for shard, file in zip(paths[1:], others, strict=True):
        if twice := first.tensors.keys() & file.tensors.keys():
            raise MalformedFile(f"tensor {min(twice)!r} of {shard.name} is also in an earlier shard")
        first.tensors |= file.tensors
    wanted = first.metadata.get("split.tensors.count", len(first.tensors))
    if len(first.tensors) != wanted:
        raise MalformedFile(f"the {count} shards of {paths[0].name} have {len(first.tensors)} tensors, not {wanted}")
    return first


def shard_paths(path: Path, count: int) -> list[Path]:
    match = NAME.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise MalformedFile(
            f"{path.name} is one of {count} shards of a model; its name must end in -00001-of-{count:05}.gguf, as it "
            f"was published, so that the other shards can be found"
        )
    return [path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
