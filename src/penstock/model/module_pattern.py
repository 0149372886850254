"""Matches module names against the patterns of an adapter's config in time linear in the name.

PEFT uses Python's `re`, where a malicious pattern can take exponential time and block all threads. Here `re` only
matches plain names, which cannot backtrack. llguidance matches all other patterns: it never backtracks, and rejects
expressions that need too many states.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from penstock.errors import AdapterError

MAX_LENGTH = 512  # characters of a pattern
MAX_PATTERNS = 4096  # a 405B model has 882 modules
MAX_EXPRESSIONS = 64  # patterns that are not plain names
NAME = re.compile(r"[A-Za-z0-9_.-]+")
ESCAPED = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]")  # characters without special meaning


class ModulePatterns:
    """Finds the first pattern that matches a module's name or, as in PEFT, the end of it after a dot."""

    def __init__(self, patterns: Iterable[str], field: str) -> None:
        """Takes the patterns of one config field; errors name the field."""
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
        if not pattern.startswith("^"):
            return rf"(?:.*\.)?(?:{pattern})"
        bare = ESCAPED.sub("", pattern)
        if any(bare[:at].count("(") == bare[:at].count(")") for at, char in enumerate(bare) if char == "|"):
            raise self._refused(pattern, "^ belongs to the first alternative only; write ^(a|b) instead of ^a|b")
        return pattern

    def _check(self, matcher: object, pattern: str) -> None:
        """Raises if llguidance rejected the pattern or needed too many states."""
        error = matcher.get_error()  # type: ignore[attr-defined]
        if error:
            reason = " ".join(error.partition("\n<state>")[0].split())
            raise self._refused(pattern, f"it cannot be matched in linear time: {reason[:200]}")

    def _refused(self, pattern: str, reason: str) -> AdapterError:
        return AdapterError(f"adapter_config.json: {self._field} has the pattern {pattern[:80]!r}: {reason}")
