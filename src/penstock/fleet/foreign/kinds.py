"""Finds out which engine answers at a URL, and lists the abilities of each kind."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any, NamedTuple

PROBES = ("/api/version", "/props", "/get_server_info", "/version", "/metrics", "/v1/models")

Found = Mapping[str, Any]  # path -> the JSON that it gave, or the text of what is no JSON; without those that failed


class EngineKind(StrEnum):
    PENSTOCK = "penstock"
    VLLM = "vllm"
    SGLANG = "sglang"
    LLAMACPP = "llamacpp"
    OLLAMA = "ollama"
    OPENAI = "openai"  # any other server with OpenAI's API


class Continuing(StrEnum):
    """Lists how an engine continues the assistant's last message."""

    NEVER = "never"  # it begins a new message
    FLAGGED = "flagged"  # continue_final_message is set
    IMPLIED = "implied"  # it always does


class KindTraits(NamedTuple):
    """Says how one kind of engine differs from others."""

    health: str = "/v1/models"  # a path that answers 200 while the engine answers requests
    continuing: Continuing = Continuing.NEVER
    echoes: bool = False  # a continued answer begins with what it continues
    tokenizes: bool = False  # /tokenize takes messages, and returns token ids
    template_fields: bool = False  # chat_template_kwargs reach the chat template


TRAITS = {
    EngineKind.PENSTOCK: KindTraits("/health", Continuing.FLAGGED, tokenizes=True, template_fields=True),
    EngineKind.VLLM: KindTraits("/health", Continuing.FLAGGED, tokenizes=True, template_fields=True),
    EngineKind.SGLANG: KindTraits("/health", Continuing.FLAGGED, template_fields=True),
    EngineKind.LLAMACPP: KindTraits("/health", Continuing.IMPLIED, echoes=True, template_fields=True),
    EngineKind.OLLAMA: KindTraits("/api/version", Continuing.IMPLIED),
    EngineKind.OPENAI: KindTraits(),
}


class EngineModel(NamedTuple):
    """Is a model that an engine lists."""

    name: str  # the name at this gateway
    id: str  # the engine's own name
    parent: str = ""  # the model that it is an adapter of
    aliases: tuple[str, ...] = ()  # further names that clients use; wildcards are allowed
    weight: float = 1.0  # its share among engines of the same priority for this model
    priority: int = 0  # engines with the lowest number are tried first


def kind_of(found: Found) -> EngineKind:
    """Returns which engine gave these answers. Some engines answer on paths of others, and then say who they are."""
    version = found.get("/api/version")
    if isinstance(version, dict):
        return EngineKind.PENSTOCK if "penstock" in version else EngineKind.OLLAMA
    props = found.get("/props")
    if isinstance(props, dict) and "default_generation_settings" in props:
        return EngineKind.LLAMACPP
    owners = {model.get("owned_by") for model in _listed(found)}
    metrics = str(found.get("/metrics", ""))
    if "/get_server_info" in found or "sglang" in owners or "sglang:" in metrics:
        return EngineKind.SGLANG
    if "vllm" in owners or "vllm:" in metrics:
        return EngineKind.VLLM
    return EngineKind.OPENAI


def models_of(found: Found) -> list[EngineModel]:
    """Returns the models that an engine lists. One that is named by its file gets the file's name."""
    ids = [(str(model["id"]), str(model.get("parent") or "")) for model in _listed(found) if model.get("id")]
    return [EngineModel(_short(id), id, parent) for id, parent in ids]


def _listed(found: Found) -> list[dict[str, Any]]:
    listed = found.get("/v1/models")
    data = listed.get("data") if isinstance(listed, dict) else None
    return [model for model in data or () if isinstance(model, dict)]


def _short(id: str) -> str:
    """Returns the name of a model whose id is a path of its file, without the path; other ids stay."""
    if id.endswith(".gguf"):
        return PurePosixPath(id.replace("\\", "/")).stem
    return id.removesuffix(":latest")
