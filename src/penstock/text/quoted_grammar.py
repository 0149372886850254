"""Converts a Lark grammar of a text to the grammar of that text within a JSON string.

Quotation marks and backslashes are escaped. Line breaks and other control characters are kept: the parser of calls
escapes them. If line breaks began like an escaped quotation mark, the library's lexer, which looks one byte ahead,
could not distinguish the two.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache

from penstock.errors import InvalidGrammar

_ESCAPES = {'"': r"\\\x22", "\\": r"\\\\"}  # as regular expressions
_COMMON = {  # Lark's common terminals that contain such characters
    "ESCAPED_STRING": r'/"([^"\\\n]|\\.)*"/',
    "C_COMMENT": r"/\/\*([^*]|\*+[^*\/])*\*+\//",
    "CPP_COMMENT": r"/\/\/[^\n]*/",
    "SH_COMMENT": r"/#[^\n]*/",
    "SQL_COMMENT": r"/--[^\n]*/",
}
_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
    |(?P<range>"(?:[^"\\\n]|\\.)+"\s*\.\.\s*"(?:[^"\\\n]|\\.)+")
    |(?P<text>"(?:[^"\\\n]|\\.)*")
    |/(?P<regex>(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n])+)/(?P<flags>[imslux]*)
    |%import\s+common\s*\.\s*(?P<imported>\w+)(?:\s*->\s*(?P<alias>\w+))?
    |%import\s+common\s*\((?P<several>[^)]*)\)
    |(?P<refused>%(?!ignore\b)\w+|<[^<>\s]+>|@\w+|~(?!\s*\d))""",
    re.VERBOSE,
)
_ATOM = re.compile(
    r"""(?P<other>\(\?[^)]*?[:>]|\(\?[a-zA-Z-]+\)|[()|*+?^$]|\{\d+(?:,\d*)?\})
    |(?P<atom>\\x\{[0-9a-fA-F]+\}|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[pP](?:\{[^}]*\}|.)|\\.
        |\[\^?\]?(?:\[:\w+:\]|\\.|[^\]\\])*\]|.)""",
    re.VERBOSE | re.DOTALL,
)


def in_json_string(lark: str) -> str:
    """Returns the grammar of a JSON string's content whose text matches `lark`. Raises InvalidGrammar for a grammar
    that imports others, names special tokens, or negates a terminal.
    """
    return _TOKEN.sub(_quoted_token, lark)


def _quoted_token(found: re.Match[str]) -> str:
    given = found.groupdict()
    if given["comment"] is not None:
        return ""
    if given["range"] is not None:
        first, last = (f"\\x{{{ord(_text_of(each)):x}}}" for each in re.findall(r'"(?:[^"\\\n]|\\.)+"', found[0]))
        return f"/{_quoted_regex(f'[{first}-{last}]', '')}/"
    if given["text"] is not None:
        return json.dumps(_text_of(found[0]).replace("\\", "\\\\").replace('"', '\\"'), ensure_ascii=False)
    if given["regex"] is not None:
        return f"/{_quoted_regex(given['regex'], given['flags'])}/{given['flags']}"
    if given["imported"] is not None:
        return _imported(given["imported"], given["alias"])
    if given["several"] is not None:
        return "\n".join(_imported(name.strip(), None) for name in given["several"].split(","))
    raise InvalidGrammar(
        f"the Lark grammar cannot be enforced, because this model's calls are JSON: leave out {found[0]!r}"
    )


def _text_of(literal: str) -> str:
    try:
        text: str = json.loads(literal, strict=False)
    except ValueError:
        raise InvalidGrammar(f"the Lark grammar cannot be used: {literal} has an escape that is unknown") from None
    return text


def _imported(name: str, alias: str | None) -> str:
    if name in _COMMON:
        return f"{alias or name}: {in_json_string(_COMMON[name])}"
    return f"%import common.{name}" + (f" -> {alias}" if alias else "")


def _quoted_regex(pattern: str, flags: str) -> str:
    if "x" in flags:
        raise InvalidGrammar(f"the Lark grammar cannot be enforced: leave the flag x out of /{pattern}/{flags}")
    dotall = "s" in flags or "(?s" in pattern
    atoms = _ATOM.finditer(pattern.replace(r"\/", "/"))
    return "".join(found["other"] or _quoted_atom(found["atom"], dotall) for found in atoms).replace("/", r"\/")


@lru_cache(maxsize=1024)
def _quoted_atom(atom: str, dotall: bool) -> str:
    atom = (r"[\s\S]" if dotall else r"[^\n]") if atom == "." else atom
    escapes = [escape for character, escape in _ESCAPES.items() if _matches(atom, character)]
    if not escapes:
        return atom
    several = atom.startswith("[") or atom[:2] in (r"\S", r"\W", r"\D", r"\p", r"\P")
    plain = [rf"[{atom}&&[^\x22\x5c]]"] if several else []
    return f"(?:{'|'.join(plain + escapes)})"


def _matches(atom: str, character: str) -> bool:
    from llguidance import LLMatcher, LLTokenizer

    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_regex(atom), log_level=0)
    return not matcher.is_error() and matcher.try_consume_tokens([ord(character)]) == 1 and matcher.is_accepting()
