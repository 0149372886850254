"""Declares the options that put other engines behind a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

from penstock.cli.framework.command import Option

if TYPE_CHECKING:
    from penstock.server.models.directory import Alias
    from penstock.server.models.fallbacks import Fallbacks
    from penstock.server.models.foreign import ForeignModels


class ForeignOptions(NamedTuple):
    engines: Annotated[
        list[str] | None,
        Option(
            name="--engine",
            help="Engine of another kind whose models are also served: vLLM, SGLang, llama.cpp, Ollama or any server "
            "with OpenAI's API, such as http://host:8000,weight=2,priority=1,key-env=KEY. May be repeated. Without a "
            "MODEL, nothing else is served.",
        ),
    ] = None

    fallback: Annotated[
        list[str] | None,
        Option(
            help="Fallback models, in order, for when no engine can answer for a model, such as big=small,tiny. Both "
            "may belong to this server or to another engine. May be repeated.",
        ),
    ] = None

    def fallbacks(self, names: Sequence[str]) -> Fallbacks:
        """Returns the fallback models; raises ConfigError if one is certainly not served."""
        from penstock.errors import ConfigError
        from penstock.server.models.fallbacks import parse_fallbacks

        fallbacks = parse_fallbacks(self.fallback or [])
        named = [name for model, others in fallbacks.items() for name in (model, *others)]
        unknown = [name for name in named if name not in names]
        if unknown and not self.engines:
            served = ", ".join(names)
            raise ConfigError(f"--fallback names {unknown[0]!r}, which is not served here: name one of {served}")
        return fallbacks

    def models(self, aliases: Sequence[Alias]) -> ForeignModels | None:
        """Returns the engines' models, if any. An alias without a model means the first one."""
        if not self.engines:
            return None
        from penstock.fleet.foreign.engine import parse_engine
        from penstock.fleet.foreign.gateway import ForeignGateway

        return ForeignGateway([parse_engine(each) for each in self.engines], aliases)
