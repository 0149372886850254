"""Finds the models that `penstock serve` serves, and says how each is loaded."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.cli import options
from penstock.cli.terminal import obtain

if TYPE_CHECKING:
    from penstock.ipc.launchers import Launcher
    from penstock.server.models import ModelSource
    from penstock.store import DerivedModel
    from penstock.text import Text

OVERHEAD = 1.1  # times the size of the files that weights take in memory, at most


class FoundModel(NamedTuple):
    """Says what a model is called, what it was asked for as, and where its files are."""

    name: str
    ref: str
    path: Path


class TextChanges(NamedTuple):
    """Says what replaces a model's own template and sampling."""

    template: str
    sampling: dict[str, Any]


def served_models(refs: Sequence[str], models_dir: str, name: str) -> list[FoundModel]:
    """Returns the models that the words on the command line mean: those named, those of a folder, else all of the
    store, else the default one. Models that are named are fetched first. One that is derived from another of them is
    left out: the other answers to its name."""
    from penstock.errors import ConfigError

    named = [obtained(ref) for ref in refs]
    folder = in_folder(Path(models_dir).expanduser()) if models_dir else []
    found = [*named, *folder] or in_store() or [obtained(options.DEFAULT_MODEL)]
    found = [each for each in found if not _answered_by_another(each, found)]
    if name:
        found[0] = found[0]._replace(name=name)
    names = [each.name for each in found]
    if twice := [each for each in names if names.count(each) > 1]:
        raise ConfigError(f"two models would be called {twice[0]!r}: rename a file, or name the first with --name")
    return found


def in_store() -> list[FoundModel]:
    """Returns all models of the store, and those derived from files beside it."""
    from penstock.store import derived_entry, derived_models, entries

    own = filter(None, (derived_entry(derived) for derived in derived_models()))
    return [FoundModel(entry.name, entry.name, entry.path) for entry in (*entries(), *own)]


def _answered_by_another(model: FoundModel, found: Sequence[FoundModel]) -> bool:
    from penstock.store import find_derived

    derived = find_derived(model.ref)
    return derived is not None and any(each.path == model.path and each is not model for each in found)


def obtained(ref: str) -> FoundModel:
    path = obtain(ref)
    return FoundModel(short_name(ref, path), ref, path)


def in_folder(folder: Path) -> list[FoundModel]:
    """Returns the models in a folder: GGUF files, of split ones the first, and folders with a config.json."""
    from penstock.errors import ModelNotFound

    if not folder.is_dir():
        raise ModelNotFound(f"--models-dir {folder} is not a folder")
    files = [path for path in sorted(folder.glob("*.gguf")) if "-of-" not in path.stem or "-00001-of-" in path.stem]
    folders = [path.parent for path in sorted(folder.glob("*/config.json"))]
    return [FoundModel(path.stem if path.is_file() else path.name, str(path), path) for path in (*files, *folders)]


def source_of(
    found: FoundModel, engine: dict[str, Any], text: TextChanges, launcher: Launcher, kv_memory: int
) -> ModelSource:
    """Returns how a model is loaded. `kv_memory` is what its KV cache takes if no option says otherwise."""
    from penstock.config import configure, parse_adapter
    from penstock.ipc.spawn import ProcessClient
    from penstock.server.models import ModelSource
    from penstock.store import size_of, with_local_draft

    given = engine if engine.get("kv_memory") else engine | {"kv_memory": kv_memory}
    config = with_local_draft(configure(found.path, given, name=found.name), obtain)
    load = partial(_load_text, found, config.config, text)
    files = size_of(found.path) + (size_of(Path(config.draft)) if config.draft else 0)
    expected = int(files * OVERHEAD) + config.kv_memory
    client = partial(ProcessClient, config, launcher)
    adapters = tuple(map(parse_adapter, config.adapter))
    return ModelSource(found.name, client, load, found.path, _derived(found), expected, adapters)


def adapters_by_model(given: Sequence[str], names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Returns the adapters of each model, as its engine takes them: MODEL/NAME=PATH is for that model, NAME=PATH for
    the first. Raises if a name is used twice."""
    from penstock.config import parse_adapter
    from penstock.errors import ConfigError

    adapters: dict[str, tuple[str, ...]] = dict.fromkeys(names, ())
    taken = set(names)
    for text in given:
        model = next((name for name in names if text.startswith(f"{name}/")), None)
        own = text if model is None else text.removeprefix(f"{model}/")
        name = parse_adapter(own).name
        if name in taken:
            raise ConfigError(f"--adapter {text}: a model or another adapter is called {name!r}: take another name")
        taken.add(name)
        adapters[model or names[0]] += (own,)
    return adapters


def settings_by_model(engine: Mapping[str, Any], adapters: Mapping[str, tuple[str, ...]]) -> dict[str, dict[str, Any]]:
    """Returns the engine options of each model, given the adapters of each. The first has the draft model, if any."""
    first = next(iter(adapters), None)
    return {
        name: {**engine, "adapter": own, "draft": engine["draft"] if name == first else ""}
        for name, own in adapters.items()
    }


def _derived(found: FoundModel) -> DerivedModel | None:
    """Returns the settings of a model that is derived, by the name that it is served by."""
    from penstock.store import find_derived

    derived = find_derived(found.ref)
    return None if derived is None else replace(derived, name=found.name)


def _load_text(found: FoundModel, fields: Sequence[str], changes: TextChanges) -> Text:
    """Loads the tokenizer, the chat template and the sampling defaults. The options replace the model's own. Warns
    about a model that comes without a template."""
    from penstock.model.load import load_text

    text = load_text(found.path, fields).with_sampling(changes.sampling)
    if changes.template:
        return text.with_template_text(changes.template)
    if text.template is None and not text.tokenizer.closing:  # an encoder has tokens that close a text, and no chats
        print(f"{found.name} has no chat template: chats are rendered as ChatML (see --chat-template)", file=sys.stderr)
    return text


def short_name(model: str, path: Path) -> str:
    """Returns the name that the model is served by."""
    from penstock.store import find

    entry = find(model)
    if entry is not None:
        return entry.name
    return path.stem if path.is_file() else path.resolve().name
