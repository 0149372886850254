"""Defines the pre-tokenizers of vocabularies with merges, by `tokenizer.ggml.pre` name."""

from __future__ import annotations

from typing import NamedTuple


class PreTokenizer(NamedTuple):
    """Describes how a family of vocabularies splits text before merging."""

    splits: tuple[str, ...]  # regular expressions, applied in turn: matches and gaps are pieces
    ignore_merges: bool = False  # a piece that is a token is not split
    add_bos: bool = False  # default
    nfc: bool = False  # text is first normalized to NFC
    written: bool = True  # export writes this name; False if few programs know it
    characters: bool = False  # merges start with a piece's characters instead of its bytes
    escaped: bool = False  # spaces are replaced as in SentencePiece before splitting


_ENDINGS = r"'s|'t|'re|'ve|'m|'ll|'d"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_GPT2 = rf"{_ENDINGS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_ONE_DIGIT = rf"(?i:{_ENDINGS})|{_LETTERS}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_THREE_DIGITS = rf"(?i:{_ENDINGS})|{_LETTERS}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_MARKS = (
    rf"(?i:{_ENDINGS})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:{_ENDINGS})?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:{_ENDINGS})?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_SEED = rf"(?i:{_ENDINGS})|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_BAILING = rf"'(?i:[sdmt]|ll|ve|re)|{_LETTERS}|\p{{N}}|{_SYMBOLS}|\s*[\r\n]|\s+(?!\S)|\s+"
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_LONG_NUMBERS = rf"(?i:{_ENDINGS})|{_LETTERS}|\p{{N}}+|{_SYMBOLS}|{_SPACES}"
_COUNTED_SPACES = (  # splits runs of spaces into powers of two
    rf"(?i:{_ENDINGS})|{_LETTERS}|\p{{N}}{{1,3}}|{_SYMBOLS}|\s*[\r\n]+"
    + "".join(rf"|\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1))
    + r"|\s{1,2}(?!\S)|\s{1}"
)
_PHRASES = (  # keeps letters separated by single spaces together
    rf"(?i:{_ENDINGS})|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_YOUTU_ASIAN = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_YOUTU = _GPT4O.replace(r"\p{N}{1,3}", r"\p{N}")
_NOT_HAN_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_NOT_HAN_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN_UPPER}*{_NOT_HAN_LOWER}+(?i:{_ENDINGS})?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN_UPPER}+{_NOT_HAN_LOWER}*(?i:{_ENDINGS})?"
    rf"|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
)
_LINES = r"[^\n]+|[\n]+"
_THREES_FROM_THE_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_AFMOE_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_BLOOM = r" ?[^(\s|.,!?" "\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-z"
    "\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
    "]+"
)
_DEEPSEEK_PUNCTUATION = r"\s?[!-/:-~" "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_DEEPSEEK_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_V3_ASIAN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"

_TABLE = (
    (("default",), PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    (
        (
            *("gpt-2", "phi-2", "jais", "trillion", "exaone4", "mellum", "gigachat", "a.x-4.0", "granite-docling"),
            *("jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code", "roberta-bpe"),
            "modern-bert",
        ),
        PreTokenizer((_GPT2,)),
    ),
    (("mpt", "olmo"), PreTokenizer((_GPT2,), nfc=True)),
    (
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    (
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        PreTokenizer((_THREE_DIGITS,), ignore_merges=True, add_bos=True),
    ),
    (("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), PreTokenizer((_THREE_DIGITS,))),
    (("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2"), PreTokenizer((_ONE_DIGIT,), nfc=True)),
    (("stablelm2", "hunyuan", "grok-2", "solar-open"), PreTokenizer((_ONE_DIGIT,))),
    (("qwen35",), PreTokenizer((_MARKS,), nfc=True)),
    (("tekken",), PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)),
    (("gpt-4o", "llama4", "minimax-m2", "kanana2", "talkie"), PreTokenizer((_GPT4O,))),
    (("granite-embed-multi-97m",), PreTokenizer((_GPT4O,), ignore_merges=True, written=False)),
    (("tiny_aya", "cohere2moe"), PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))),
    (
        ("gemma4", "granite-embed-multi-311m"),
        PreTokenizer((_LINES,), ignore_merges=True, add_bos=True, written=False, characters=True, escaped=True),
    ),
    (("sarvam-moe",), PreTokenizer((_LINES,), written=False, characters=True, escaped=True)),
    (("whitespace",), PreTokenizer((r"\S+",), written=False, characters=True)),
    (("kimi-k2",), PreTokenizer((_KIMI,))),
    (("youtu",), PreTokenizer((_YOUTU_ASIAN, _YOUTU), ignore_merges=True)),
    (("minicpm5",), PreTokenizer((r"\p{N}{1,3}", _LONG_NUMBERS), ignore_merges=True)),
    (("jais-2",), PreTokenizer((_COUNTED_SPACES,))),
    (("laguna",), PreTokenizer((_LINES, _ONE_DIGIT))),
    (("exaone-moe",), PreTokenizer((_PHRASES,))),
    (("superbpe",), PreTokenizer((r"\p{N}+", r"\d{1,3}(?=(?:\d{3})*(?!\d))"))),
    (("poro-chat", "bloom", "gpt3-finnish"), PreTokenizer((_BLOOM,))),
    (("viking",), PreTokenizer((_BLOOM, r"\p{N}"))),
    (
        ("chameleon",),
        PreTokenizer(
            (
                *("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", "([\\t\\n]|    |  )", r"\p{N}"),
                *(r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
            ),
            add_bos=True,
        ),
    ),
    (("afmoe",), PreTokenizer((_THREES_FROM_THE_RIGHT, _AFMOE_ASIAN, _DEEPSEEK_V3))),
    (("seed-coder",), PreTokenizer((_SEED,))),
    (("bailingmoe", "bailingmoe2", "llada-moe"), PreTokenizer((_BAILING,))),
    (("falcon",), PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    (
        ("deepseek-llm",),
        PreTokenizer((r"[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_PUNCTUATION, r"\s+$", _DEEPSEEK_ASIAN, r"\p{N}+")),
    ),
    (
        ("deepseek-coder",),
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_ASIAN, r"\p{N}")),
    ),
    (
        ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
        PreTokenizer((r"\p{N}{1,3}", _DEEPSEEK_V3_ASIAN, _DEEPSEEK_V3)),
    ),
)

PRETOKENIZERS = {name: entry for names, entry in _TABLE for name in names}
