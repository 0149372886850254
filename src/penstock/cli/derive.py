"""Implements `penstock create` and `penstock cp`, which give models further names with settings of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from penstock.cli.framework.command import Argument, Option
from penstock.cli.terminal import note

if TYPE_CHECKING:
    from penstock.store import DerivedModel, Modelfile

NewName = Annotated[str, Argument(metavar="NAME", help="Name of the new model.")]


def create(
    name: NewName,
    *,
    file: Annotated[str, Option(help="The Modelfile.", short="-f")] = "Modelfile",
) -> None:
    """Derive a model from another: with a system prompt, a template, parameters or adapters of its own.

      penstock create pirate -f Modelfile
      penstock run pirate "Where is the treasure?"

    A Modelfile has lines that begin with FROM (required), SYSTEM, TEMPLATE, PARAMETER, MESSAGE, ADAPTER and LICENSE, as
    in Ollama. FROM names a model or a file. Nothing is copied.
    """
    from penstock.errors import ModelNotFound
    from penstock.store import read_modelfile, save_derived

    path = Path(file).expanduser()
    if not path.is_file():
        raise ModelNotFound(f"there is no Modelfile {file!r}: write one, or name it with -f")
    made = read_modelfile(path.read_text())
    _check(made)
    adapters = [_adapter(_beside(path, adapter)) for adapter in made.adapters]
    root = _root(made.base, path)
    save_derived(
        replace(
            root,
            name=name.removesuffix(":latest"),
            adapters=[*root.adapters, *adapters],
            system=made.system or root.system,
            template=made.template or root.template,
            parameters=root.parameters | made.parameters,
            messages=made.messages or root.messages,
            license=made.license or root.license,
        )
    )
    note(f"created {name} from {made.base}")


def cp(source: Annotated[str, Argument(metavar="MODEL", help="A model of the store.")], name: NewName) -> None:
    """Give a model of the store another name. Its files are not copied.

    penstock cp smollm2 gpt-4o
    """
    from penstock.store import save_derived

    save_derived(replace(_root(source, None), name=name.removesuffix(":latest")))
    note(f"{name} is another name of {source}")


def _check(made: Modelfile) -> None:
    """Raises for unsupported parameters and templates."""
    from penstock.errors import ConfigError, InvalidRequest
    from penstock.server.context.request_context import RequestContext
    from penstock.server.generation.modelfile import check_options
    from penstock.text.ollama_template import OllamaTemplate

    try:
        check_options(RequestContext(lenient=False), made.parameters | {"num_ctx": None})  # a server limits the context
    except InvalidRequest as error:
        raise ConfigError(f"PARAMETER of the Modelfile: {error}") from None
    try:
        if made.template:
            OllamaTemplate(made.template)
    except InvalidRequest as error:
        raise ConfigError(f"TEMPLATE of the Modelfile: {error}; without TEMPLATE, the model's own is used") from None


def _root(ref: str, modelfile: Path | None) -> DerivedModel:
    """Returns the base of a new model: the derived model of that name, or an unchanged model or file."""
    from penstock.errors import ModelNotFound
    from penstock.store import DerivedModel, find, find_derived

    path, plain = _beside(modelfile, ref), ref.removesuffix(":latest")
    if path.exists():
        return DerivedModel(name="", base=path.stem if path.is_file() else path.name, path=str(path))
    if derived := find_derived(plain):
        return derived
    entry = find(plain)
    if entry is None:
        raise ModelNotFound(f"{ref!r} is not in the store: run `penstock pull {ref}` first")
    return DerivedModel(name="", base=entry.name)


def _adapter(path: Path) -> str:
    """Returns an adapter's path; raises if it does not exist. Loading the model checks whether it fits."""
    from penstock.errors import AdapterNotFound
    from penstock.model.adapter_files import missing_text, tensors_of

    if not tensors_of(path).is_file():
        raise AdapterNotFound(missing_text(path))
    return str(path)


def _beside(modelfile: Path | None, ref: str) -> Path:
    path = Path(ref).expanduser()
    return path.absolute() if modelfile is None else (modelfile.absolute().parent / path).resolve()
