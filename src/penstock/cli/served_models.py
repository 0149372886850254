"""Finds the models that `penstock serve` serves, and how each is loaded."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from penstock.cli.fitting import MemoryAdvisor, with_stored_quantize
from penstock.cli.framework import options
from penstock.cli.terminal import note, obtain

if TYPE_CHECKING:
    from penstock.config import Config
    from penstock.ipc.client import EngineClient
    from penstock.ipc.launchers import Launcher
    from penstock.server.models.ledger import Budget
    from penstock.server.models.source import ModelSource
    from penstock.store import DerivedModel
    from penstock.text import Text

MakeClient: TypeAlias = "Callable[[Config], EngineClient]"
OVERHEAD = 1.1  # memory of weights, as a multiple of the file size, at most
LIKELY_LOADED = 4  # expected number of loaded models without a limit
SETTLED_NS = 2 * 10**9  # a folder unchanged for this long gets a new timestamp at its next change


class FoundModel(NamedTuple):
    """Describes a model: its name, its reference, and its path."""

    name: str
    ref: str
    path: Path
    fixed: bool = False  # named on the command line, and served until the server ends


class MemoryShares(NamedTuple):
    """Holds engine options about memory that the user did not set; 0 and auto: the engine decides."""

    kv_memory: int
    adapter_memory: int
    kv_ram: str


class TextChanges(NamedTuple):
    """Holds replacements of a model's own template and sampling."""

    template: str
    sampling: dict[str, Any]


class ModelFinder:
    """Finds the models on the command line: those named, those in a folder, else all in the store, else the default
    one. Named models are downloaded first. A model derived from another named one is left out: the base answers to its
    name.
    """

    def __init__(
        self,
        refs: Sequence[str],
        models_dir: str,
        name: str,
        *,
        others: bool = False,
        engine: Mapping[str, Any] | None = None,
    ) -> None:
        """Finds the initial models. `name` names the first. `others`: other engines have models, so none may be found
        here. Downloads are chosen to fit with the options of the `engine`.
        """
        from penstock.errors import ConfigError

        self._named = [obtained(ref, engine or {}) for ref in refs]
        self._folder = Path(models_dir).expanduser() if models_dir else None
        self._whole_store = not (self._named or self._in_folder() or others)
        if self._whole_store and not in_store():
            obtained(options.DEFAULT_MODEL, engine or {})
        self._stamps = self._now()
        found = self._all()
        self._own_names = {found[0].path: name} if name and found else {}
        self.found = [self._renamed(each) for each in found]
        names = [each.name for each in self.found]
        if twice := [each for each in names if names.count(each) > 1]:
            raise ConfigError(f"two models would be called {twice[0]!r}: rename a file, or name the first with --name")

    @property
    def changes(self) -> bool:
        return self._whole_store or self._folder is not None

    def find_again(self) -> list[FoundModel] | None:
        """Returns the current models; None if unchanged. Of two with the same name, the first counts."""
        from penstock.errors import PenstockError

        before, self._stamps = self._stamps, self._now()
        if before is not None and before == self._stamps:
            return None
        try:
            found: dict[str, FoundModel] = {}
            for each in map(self._renamed, self._all()):
                found.setdefault(each.name, each)
        except PenstockError as error:
            import logging  # slow to import, and --help does not need it

            logging.getLogger(__name__).warning("the server keeps its current models: %s", error)
            return None
        last, self.found = self.found, list(found.values())
        return None if last == self.found else self.found

    def _all(self) -> list[FoundModel]:
        found = [*self._named, *self._in_folder(), *(in_store() if self._whole_store else [])]
        return [each for each in found if not _answered_by_another(each, found)]

    def _in_folder(self) -> list[FoundModel]:
        return [] if self._folder is None else in_folder(self._folder)

    def _renamed(self, found: FoundModel) -> FoundModel:
        return found._replace(name=self._own_names.get(found.path, found.name))

    def _now(self) -> frozenset[tuple[str, int]] | None:
        """Returns the modification times of the watched folders; None if one is too recent to detect further
        changes.
        """
        from penstock.store import record_folders

        folders = list(record_folders()) if self._whole_store else []
        if self._folder is not None:
            folders += [self._folder, *(path for path in self._folder.glob("*/"))]
        stamps = frozenset((str(path), path.stat().st_mtime_ns) for path in folders if path.is_dir())
        lately = time.time_ns() - SETTLED_NS
        return None if any(stamp > lately for _, stamp in stamps) else stamps


def in_store() -> list[FoundModel]:
    from penstock.store import derived_entry, derived_models, entries

    own = filter(None, (derived_entry(derived) for derived in derived_models()))
    return [FoundModel(entry.name, entry.name, entry.path) for entry in (*entries(), *own)]


def _answered_by_another(model: FoundModel, found: Sequence[FoundModel]) -> bool:
    from penstock.store import find_derived

    derived = find_derived(model.ref)
    return derived is not None and any(each.path == model.path and each is not model for each in found)


def obtained(ref: str, engine: Mapping[str, Any]) -> FoundModel:
    path = obtain(ref, MemoryAdvisor(engine))
    return FoundModel(short_name(ref, path), ref, path, fixed=True)


def in_folder(folder: Path) -> list[FoundModel]:
    """Returns the models in a folder: GGUF files, the first of split ones, and folders with a config.json."""
    from penstock.errors import ModelNotFound
    from penstock.store.paths import gguf_models

    if not folder.is_dir():
        raise ModelNotFound(f"--models-dir {folder} is not a folder")
    try:
        files = [folder / name for name in gguf_models(os.listdir(folder))]
    except OSError as error:  # it may have been removed or made private while the server runs
        raise ModelNotFound(f"--models-dir {folder} cannot be read: {error.strerror}") from error
    found = (*files, *(path.parent for path in sorted(folder.glob("*/config.json"))))
    return [FoundModel(path.stem if path.is_file() else path.name, str(path), path) for path in found]


class ModelSources:
    """Describes how a server's models are loaded. Later models are loaded as on a server with several."""

    def __init__(
        self,
        finder: ModelFinder,
        engine: dict[str, Any],
        adapters: Sequence[str],
        text: TextChanges,
        budget: Budget,
        make_client: MakeClient | None = None,
    ) -> None:
        """Takes the options of all engines, the adapters as on the command line, and the memory of all models together.
        `make_client` makes a model's client; the default starts an engine process.
        """
        self._finder = finder
        self._engine = engine
        self._adapters = adapters_by_model(adapters, [each.name for each in finder.found])
        self._text = text
        self._made: dict[FoundModel, ModelSource] = {}
        self._make_client = make_client
        self._several = len(finder.found) > 1 or finder.changes
        maker = self._client_maker(several=len(finder.found) > 1, warm=True)
        shares = partial(model_shares, budget, disk=bool(engine.get("kv_disk")))
        self.first = [self._make(each, maker, shares(len(finder.found))) for each in finder.found]
        self._shares = shares(max(len(finder.found), LIKELY_LOADED))

    def find_again(self) -> list[ModelSource] | None:
        """Returns the sources of the current models; None if unchanged."""
        found = self._finder.find_again()
        if found is None:
            return None
        return [self._make(each, self._client_maker(several=True, warm=False), self._shares) for each in found]

    def _client_maker(self, *, several: bool, warm: bool) -> MakeClient:
        if self._make_client is not None:
            return self._make_client
        from penstock.ipc.spawn import ProcessClient

        launcher = launcher_of_several(warm) if several else launcher_of_one()
        return lambda config: ProcessClient(config, launcher)

    def _make(self, found: FoundModel, make_client: MakeClient, shares: MemoryShares) -> ModelSource:
        if found not in self._made:
            own: dict[str, Any] = {"adapter": self._adapters.get(found.name, ())}
            if found != self._finder.found[0]:
                own["draft"] = ""
            options = self._engine | own
            self._made[found] = source_of(found, options, self._text, make_client, shares, several=self._several)
        return self._made[found]


def launcher_of_one() -> Launcher:
    from penstock.ipc.launchers import SpawnLauncher, SpawnThenForkLauncher

    return SpawnThenForkLauncher() if hasattr(os, "fork") else SpawnLauncher()


def launcher_of_several(warm: bool) -> Launcher:
    """Returns the launcher for models that are loaded repeatedly: their engines are forked, if the system can. The
    parent process starts now if `warm`, else with the first engine.
    """
    from penstock.ipc.launchers import ForkLauncher, SpawnLauncher

    if not hasattr(os, "fork"):
        return SpawnLauncher()
    forking = ForkLauncher()
    if warm:
        forking.warm_up()
    return forking


def model_shares(budget: Budget, models: int, disk: bool = False) -> MemoryShares:
    """Divides the memory among several models' KV caches and adapters, where no option does; 0: the model decides. Half
    of the budget is for caches and an eighth for adapters, divided by the expected number of loaded models. Evicted
    blocks are not kept in memory, unless they pass through it to and from `disk`.
    """
    from penstock.config import AUTO

    if models == 1:
        return MemoryShares(0, 0, AUTO)
    each = budget.bytes // min(models, budget.models or LIKELY_LOADED)
    return MemoryShares(each // 2, each // 8, str(each // 8) if disk else "0")


def source_of(
    found: FoundModel,
    engine: dict[str, Any],
    text: TextChanges,
    make_client: MakeClient,
    shares: MemoryShares,
    *,
    several: bool,
) -> ModelSource:
    """Describes how a model is loaded; `several`: it shares its options with other models."""
    from penstock.config import AUTO, configure, parse_adapter
    from penstock.server.models.source import ModelSource
    from penstock.store import with_local_draft

    unset = {name: share for name, share in shares._asdict().items() if engine.get(name) in (None, 0, AUTO)}
    given = with_stored_quantize(found.path, engine | unset)
    config = with_local_draft(configure(found.path, given, name=found.name), obtain)
    config = replace(config, max_len_for_all=several)
    load = partial(_load_text, found, config.config, text)
    client = partial(make_client, config)
    adapters = tuple(map(parse_adapter, config.adapter))
    expected = partial(_expected, config)
    return ModelSource(
        found.name,
        client,
        load,
        found.path,
        _derived(found),
        expected,
        adapters,
        found.fixed,
        partial(_check_files, config),
    )


def _check_files(config: Config) -> None:
    """Raises the errors that an engine would find in a model's files before reading weights."""
    from penstock.model.load import open_checkpoint

    open_checkpoint(Path(config.model), config.config, config.strict_config, config.max_len)


def _expected(config: Config) -> int:
    """Returns the expected bytes of a model: the sum of the ledger's entries."""
    from penstock.config import AUTO
    from penstock.planning.memory_plan import adapter_memory
    from penstock.store import size_of

    files = sum(size_of(Path(path)) for path in (config.model, config.draft_model) if path)
    kv_ram = 0 if config.kv_ram == AUTO else int(config.kv_ram)
    return int(files * OVERHEAD) + config.kv_memory + kv_ram + adapter_memory(config)


def adapters_by_model(given: Sequence[str], names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Returns each model's adapters in the engine's notation: MODEL/NAME=PATH is for that model, NAME=PATH for the
    first. Raises if a name is used twice.
    """
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


def _derived(found: FoundModel) -> DerivedModel | None:
    from penstock.store import find_derived

    derived = find_derived(found.ref)
    return None if derived is None else replace(derived, name=found.name)


def _load_text(found: FoundModel, fields: Sequence[str], changes: TextChanges) -> Text:
    """Loads the tokenizer, the chat template and the sampling defaults. Options override the model's own. Warns about a
    missing template.
    """
    from penstock.model.load import load_text

    text = load_text(found.path, fields).with_sampling(changes.sampling)
    if changes.template:
        return _isolated(text.with_template_text(changes.template))
    if text.template is None and not text.tokenizer.closing:  # an encoder has closing tokens and needs no template
        note(f"{found.name} has no chat template: chats are rendered as ChatML (see --chat-template)")
    return _isolated(text)


def _isolated(text: Text) -> Text:
    from penstock.templates.process import RenderProcess

    process = RenderProcess()
    isolated = text.isolated(process)
    if isolated.template is not None and isolated.template.process is process:
        process.warm_up()
    return isolated


def short_name(model: str, path: Path) -> str:
    from penstock.store import find

    entry = find(model)
    if entry is not None:
        return entry.name
    return path.stem if path.is_file() else path.resolve().name
