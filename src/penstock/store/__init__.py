"""Manages the models on this machine: fetches, finds, lists, removes and derives them."""

from __future__ import annotations

from penstock.config import home
from penstock.store.blobs import Upload, blob_path
from penstock.store.catalogue import CATALOGUE, CatalogueModel
from penstock.store.derived import (
    DerivedModel,
    adapter_of_blobs,
    check_name,
    delete_derived,
    delete_unused_blobs,
    derived_model,
    derived_models,
    save_derived,
)
from penstock.store.fitting import Advisor, PlannedFit
from penstock.store.modelfile import Modelfile, read_modelfile
from penstock.store.paths import Entry, packed_size, sha256_of, size_of
from penstock.store.progress import Progress
from penstock.store.quantizations import fit
from penstock.store.refs import ALIASES, DEFAULT, full_name, nearest_names
from penstock.store.store import (
    derived_entry,
    derived_path,
    entries,
    fetch,
    find,
    find_derived,
    looks_like_model,
    record_folders,
    remove,
    stored_names,
    with_local_draft,
)

__all__ = [
    "ALIASES",
    "CATALOGUE",
    "DEFAULT",
    "Advisor",
    "CatalogueModel",
    "DerivedModel",
    "Entry",
    "Modelfile",
    "PlannedFit",
    "Progress",
    "Upload",
    "adapter_of_blobs",
    "blob_path",
    "check_name",
    "delete_derived",
    "delete_unused_blobs",
    "derived_entry",
    "derived_model",
    "derived_models",
    "derived_path",
    "entries",
    "fetch",
    "find",
    "find_derived",
    "fit",
    "full_name",
    "home",
    "looks_like_model",
    "nearest_names",
    "packed_size",
    "read_modelfile",
    "record_folders",
    "remove",
    "save_derived",
    "sha256_of",
    "size_of",
    "stored_names",
    "with_local_draft",
]
