"""Implements `penstock merge`, which writes a model with an adapter merged into its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from penstock.cli.framework import options
from penstock.cli.framework.command import Argument, Option, UsageError
from penstock.cli.terminal import note, obtain


def merge(
    model: options.ModelRef,
    adapter: Annotated[str, Argument(metavar="ADAPTER", help="A PEFT folder or a GGUF file.")],
    out: Annotated[str, Argument(metavar="OUT", help="File or folder to write, of the same kind as MODEL.")],
    scale: Annotated[float, Option(help="Factor of the adapter's update.")] = 1.0,
    force: Annotated[bool, Option(help="Overwrite OUT if it is an existing file.")] = False,
) -> None:
    """Write a model with an adapter (LoRA) merged into its weights.

      penstock merge ./Llama-3.2-1B-Instruct ./my-adapter ./merged
      penstock merge model.gguf adapter.gguf merged.gguf --scale 0.5

    Plain weights keep their formats. Quantized weights that the adapter changes become Q8_0, because fewer bits would
    lose the update; `penstock quantize --again` makes them smaller.
    """
    path, target = obtain(model), Path(out).expanduser()
    check_target(path, target, force)

    from penstock.backend.cpu.quantize import quantize
    from penstock.cli.quantize import write_export
    from penstock.config import available_threads
    from penstock.model.merge import merge_folder, merge_gguf, open_merge
    from penstock.model.tensor import Format, Tensor

    def encode(tensor: Tensor, format: Format) -> Tensor:
        return quantize(tensor, format, available_threads())

    opened = open_merge(path, Path(adapter).expanduser(), scale)
    if path.is_dir():
        merge_folder(path, opened, encode, target)
    else:
        exported = merge_gguf(path, opened, encode)
        write_export(target, exported)
        for remark in exported.notes:
            note(remark)
    print(f"{target}  {len(opened.adapter.matrices)} weights were merged")


def check_target(path: Path, target: Path, force: bool) -> None:
    """Raises UsageError if a model of this kind cannot be written there."""
    if path.is_dir() and target.exists():
        raise UsageError(f"{target} exists: name a folder that does not")
    if not path.is_dir() and (target.suffix != ".gguf" or target.is_dir()):
        raise UsageError(f"{path.name} is a GGUF file, so the output must end in .gguf; got {target}")
    if not path.is_dir() and target.exists() and not force:
        raise UsageError(f"{target} exists; --force overwrites it")
    if not target.absolute().parent.is_dir():
        raise UsageError(f"{target} cannot be written: its folder does not exist")
