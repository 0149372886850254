"""Matches names of modules with the patterns of an adapter's config, in time linear in the name.

PEFT hands these patterns to Python's `re`, which may need exponential time for one that a stranger wrote, and stops all
threads meanwhile. Names are matched by `re` here, because an expression without repetition is safe. All others are
matched by llguidance, which knows no backtracking and gives up on expressions that need too many states.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from penstock.errors import AdapterError

MAX_LENGTH = 512  # characters of a pattern
MAX_PATTERNS = 4096  # a model of 405B parameters has 882 modules
MAX_EXPRESSIONS = 64  # patterns that are not names
NAME = re.compile(r"[A-Za-z0-9_.-]+")
ESCAPED = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]")  # characters without a meaning of their own


class ModulePatterns:
    """Finds the first pattern that matches a module's name or, as in PEFT, the end of it after a dot."""

    def __init__(self, patterns: Iterable[str], field: str) -> None:
        """`field` is the config's field that has the patterns; errors name it."""
        self._field = field
        given = list(patterns)
        expressions = sum(not NAME.fullmatch(pattern) for pattern in given)
        if len(given) > MAX_PATTERNS or expressions > MAX_EXPRESSIONS:
            raise AdapterError(
                f"adapter_config.json: {field} has {len(given)} patterns, {expressions} of them with more than a name; "
                f"at most {MAX_PATTERNS} and {MAX_EXPRESSIONS} are supported: write names of modules instead"
            )
        self._matches = {pattern: self._matcher(pattern) for pattern in given}

    def first(self, module: str) -> str | None:
        """Returns the first pattern that matches; None if none does."""
        return next((pattern for pattern, matches in self._matches.items() if matches(module)), None)

    def _matcher(self, pattern: str) -> Callable[[str], bool]:
        if len(pattern) > MAX_LENGTH:
            raise self._refused(pattern, f"it has {len(pattern)} characters; at most {MAX_LENGTH} are supported")
        if NAME.fullmatch(pattern):
            name = re.compile(rf"(?:.*\.)?{pattern}")
            return lambda module: name.fullmatch(module) is not None
        return self._expression(pattern)

    def _expression(self, pattern: str) -> Callable[[str], bool]:
        from llguidance import LLMatcher, LLTokenizer

        grammar = LLMatcher.grammar_from_regex(self._whole_name(pattern))
        start = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
        self._check(start, pattern)

        def matches(module: str) -> bool:
            matcher, text = start.deep_copy(), list(module.encode())
            whole = matcher.try_consume_tokens(text) == len(text) and matcher.is_accepting()
            self._check(matcher, pattern)
            return whole

        return matches

    def _whole_name(self, pattern: str) -> str:
        """Returns a pattern for whole names. With ^ at its beginning it leaves out no part of the name."""
        if not pattern.startswith("^"):
            return rf"(?:.*\.)?(?:{pattern})"
        bare = ESCAPED.sub("", pattern)
        if any(bare[:at].count("(") == bare[:at].count(")") for at, char in enumerate(bare) if char == "|"):
            raise self._refused(pattern, "^ belongs to the first alternative only; write ^(a|b) instead of ^a|b")
        return pattern

    def _check(self, matcher: object, pattern: str) -> None:
        """Raises if llguidance could not use the pattern, or needed too many states for it."""
        error = matcher.get_error()  # type: ignore[attr-defined]
        if error:
            reason = " ".join(error.partition("\n<state>")[0].split())
            raise self._refused(pattern, f"it cannot be matched in linear time: {reason[:200]}")

    def _refused(self, pattern: str, reason: str) -> AdapterError:
        return AdapterError(f"adapter_config.json: {self._field} has the pattern {pattern[:80]!r}: {reason}")
