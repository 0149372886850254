"""Watches an answer for the text, the token or the pattern from which a lazy grammar applies."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import InvalidGrammar
from penstock.types import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

ANYTHING = "(?s:.)*"


class PatternTrigger(NamedTuple):
    """Holds a regular expression as matchers of bytes, which never backtrack: for a text that contains the pattern, for
    the text before the pattern's first group, and for the text from there on."""

    whole: LLMatcher
    before: LLMatcher
    after: LLMatcher

    def start(self, text: bytes) -> int:
        before = self.before.deep_copy()
        for at in range(len(text) + 1):
            if before.is_accepting() and _matches(self.after, text[at:]):
                return at
            if at < len(text) and not before.consume_token(text[at]):
                break
        return 0


def compile_patterns(patterns: tuple[str, ...]) -> tuple[PatternTrigger, ...]:
    """Returns the patterns ready to be watched for; raises InvalidGrammar for one that cannot be."""
    if not patterns:
        return ()
    from llguidance import LLTokenizer

    tokenizer = LLTokenizer("byte")
    return tuple(_pattern(tokenizer, pattern) for pattern in patterns)


def _pattern(tokenizer: LLTokenizer, pattern: str) -> PatternTrigger:
    body = pattern.removeprefix("^")
    lead = "" if pattern.startswith("^") else ANYTHING
    trail = ANYTHING
    if re.search(r"(?<!\\)(\\\\)*\$$", body):
        body, trail = body[:-1], ""
    group = _first_group(body)
    expressions = (f"{lead}(?:{body}){trail}", f"{lead}{body[:group]}", f"{body[group:]}{trail}")
    return PatternTrigger(*(_matcher(tokenizer, each, pattern) for each in expressions))


def _matcher(tokenizer: LLTokenizer, expression: str, pattern: str) -> LLMatcher:
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex(expression), log_level=0)
    if matcher.is_error():
        raise InvalidGrammar(f"the trigger {pattern!r} cannot be used: {' '.join(matcher.get_error().split())[:200]}")
    return matcher


def _first_group(pattern: str) -> int:
    """Returns where the first group that is not within another begins; 0 if there is none or it is one of several
    alternatives."""
    depth, first, within, at = 0, -1, False, 0
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            at += 1
        elif within:
            within = character != "]"
        elif character == "[":
            within = True
        elif character == "(":
            if depth == 0 and first < 0 and not pattern.startswith("(?", at):
                first = at
            depth += 1
        elif character == ")":
            depth -= 1
        elif character == "|" and depth == 0:
            return 0
        at += 1
    return max(first, 0)


def _matches(matcher: LLMatcher, text: bytes) -> bool:
    matcher = matcher.deep_copy()
    return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


class TriggerWatch:
    """Follows one answer until a trigger was generated."""

    def __init__(
        self,
        grammar: Grammar,
        patterns: tuple[PatternTrigger, ...],
        spell: Callable[[int], bytes],
        encode: Callable[[bytes], list[int]],
    ) -> None:
        self._texts = [text.encode() for text in grammar.triggers]
        self._tokens = frozenset(grammar.trigger_tokens)
        self._patterns = [(pattern, pattern.whole.deep_copy()) for pattern in patterns]
        self._spell = spell
        self._encode = encode
        self._text = bytearray()
        self._generated: list[tuple[int, int]] = []  # tokens, and where in the text each begins

    def take(self, token: int) -> list[int] | None:
        """Returns the tokens that the grammar begins with, once a trigger was generated; until then, None."""
        self._generated.append((token, len(self._text)))
        if token in self._tokens:
            return [token]
        piece = self._spell(token)
        self._text += piece
        starts = [self._find(text, len(piece)) for text in self._texts]
        starts += [self._advance(pattern, whole, piece) for pattern, whole in self._patterns]
        found = [start for start in starts if start >= 0]
        return self._since(min(found)) if found else None

    def free_run(self, tokens: Sequence[int]) -> int:
        longest = max(map(len, self._texts), default=0)
        text = bytes(self._text[max(len(self._text) - longest + 1, 0) :])
        patterns = [whole.deep_copy() for _, whole in self._patterns if not whole.is_error()]
        for count, token in enumerate(tokens):
            piece = self._spell(token)
            text = text[max(len(text) - longest + 1, 0) :] + piece
            if token in self._tokens or any(trigger in text for trigger in self._texts):
                return count
            if any(whole.consume_tokens(list(piece)) and whole.is_accepting() for whole in patterns):
                return count
        return len(tokens)

    def _find(self, text: bytes, fresh: int) -> int:
        return self._text.find(text, max(0, len(self._text) - fresh - len(text) + 1))

    def _advance(self, pattern: PatternTrigger, whole: LLMatcher, piece: bytes) -> int:
        if whole.is_error() or not whole.consume_tokens(list(piece)) or not whole.is_accepting():
            return -1
        return pattern.start(bytes(self._text))

    def _since(self, start: int) -> list[int]:
        """Returns the tokens from a place in the text on. A token that lies across the place is spelled anew."""
        at = max(index for index, (_, begins) in enumerate(self._generated) if begins <= start)
        token, begins = self._generated[at]
        rest = [each for each, _ in self._generated[at + 1 :]]
        if begins == start:
            return [token, *rest]
        ends = self._generated[at + 1][1] if rest else len(self._text)
        return [*self._encode(bytes(self._text[start:ends])), *rest]
