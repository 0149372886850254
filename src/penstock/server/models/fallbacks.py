"""Lists the models that answer instead of an unavailable one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from penstock.errors import ConfigError

Fallbacks = Mapping[str, tuple[str, ...]]  # model -> fallbacks, in order


def parse_fallbacks(options: Sequence[str]) -> Fallbacks:
    """Parses options such as big=small,tiny; raises ConfigError if one is wrong, or if a model would be its
    own fallback, be it over others."""
    fallbacks: dict[str, tuple[str, ...]] = {}
    for option in options:
        model, _, listed = (part.strip() for part in option.partition("="))
        others = tuple(each.strip() for each in listed.split(","))
        if not model or not all(others):
            raise ConfigError(f"--fallback is written MODEL=OTHER or MODEL=OTHER,OTHER; got {option!r}")
        fallbacks[model] = fallbacks.get(model, ()) + others
    for model in fallbacks:
        if circle := _circle(fallbacks, (model,)):
            raise ConfigError(f"--fallback leads in a circle, {' -> '.join(circle)}: remove one of these")
    return fallbacks


def fallbacks_of(fallbacks: Fallbacks, model: str) -> list[str]:
    """Returns the models to try instead of one: its fallbacks, each followed by its own fallbacks."""
    return list(dict.fromkeys(_all_of(fallbacks, model)))


def _all_of(fallbacks: Fallbacks, model: str) -> Iterator[str]:
    for other in fallbacks.get(model, ()):
        yield other
        yield from _all_of(fallbacks, other)


def _circle(fallbacks: Fallbacks, way: tuple[str, ...]) -> tuple[str, ...]:
    """Returns a way that comes back to where it has been; empty: there is none from here."""
    if way[-1] in way[:-1]:
        return way[way.index(way[-1]) :]
    circles = (_circle(fallbacks, (*way, other)) for other in fallbacks.get(way[-1], ()))
    return next((circle for circle in circles if circle), ())
