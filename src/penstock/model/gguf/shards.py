"""Models split over several GGUF files: name-00001-of-00003.gguf and so on, of which any one is asked for.

The first part has the metadata; each knows its own number, how many there are, and how many tensors all have together.
"""

from __future__ import annotations

import re
from pathlib import Path

from penstock.errors import MalformedFile, ModelNotFound
from penstock.model.gguf.reader import GgufFile, read_gguf

NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
MOST = 1000  # parts


def read_parts(path: Path) -> GgufFile:
    """A whole model."""
    file = read_gguf(path)
    count = file.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= MOST:
        raise MalformedFile(f"{path.name} claims to be one of {count!r} parts; at most {MOST} can be right")
    return joined(path, count) if count > 1 else file


def joined(path: Path, count: int) -> GgufFile:
    paths = part_paths(path, count)
    if missing := [part.name for part in paths if not part.exists()]:
        raise ModelNotFound(
            f"{path.name} is one of {count} parts of a model; beside it is no {missing[0]}"
            + (f", and {len(missing) - 1} more are missing" if len(missing) > 1 else "")
        )
    files = [read_gguf(part) for part in paths]
    for number, (part, file) in enumerate(zip(paths, files, strict=True)):
        told = file.metadata.get("split.no"), file.metadata.get("split.count")
        if told != (number, count):
            raise MalformedFile(f"{part.name} says split.no and split.count are {told}, not {(number, count)}")
    first, *others = files
    for part, file in zip(paths[1:], others, strict=True):
        if twice := first.tensors.keys() & file.tensors.keys():
            raise MalformedFile(f"tensor {min(twice)!r} of {part.name} is also in a part before it")
        first.tensors |= file.tensors
    wanted = first.metadata.get("split.tensors.count", len(first.tensors))
    if len(first.tensors) != wanted:
        raise MalformedFile(f"the {count} parts of {paths[0].name} have {len(first.tensors)} tensors, not {wanted}")
    return first


def part_paths(path: Path, count: int) -> list[Path]:
    match = NAME.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise MalformedFile(
            f"{path.name} is one of {count} parts of a model; its name must end in -00001-of-{count:05}.gguf as it was "
            f"published, so that the others can be found beside it"
        )
    return [path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
