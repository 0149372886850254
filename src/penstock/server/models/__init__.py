"""Keeps the models of a server: which there are, which are loaded, and which must make room."""

from penstock.server.models.fallbacks import Fallbacks, parse_fallbacks
from penstock.server.models.pool import Alias, ModelPool, PoolSettings, client_aliases
from penstock.server.models.source import ModelSource

__all__ = ["Alias", "Fallbacks", "ModelPool", "ModelSource", "PoolSettings", "client_aliases", "parse_fallbacks"]
