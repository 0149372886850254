"""Makes tests/text/data: two small vocabularies, and what implementations other than ours make of texts.

    pip install gguf protobuf sentencepiece tiktoken tokenizers xllamacpp
    python scripts/make_tokenizer_vectors.py SmolLM2-135M-Instruct.Q4_1.gguf

byte_level.json is trained with tokenizers, over word boundaries, so that where a family cuts text shows in the ids; it
is encoded by tiktoken and, for every family, by llama.cpp. sentencepiece.json and unigram.json are
SentencePiece's own, and smollm2.json holds llama.cpp's ids for the default model.
"""

from __future__ import annotations

import io
import json
import random
import re
import sys
import tempfile
import unicodedata
import urllib.request
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import sentencepiece
import tiktoken
import xllamacpp
from sentencepiece import sentencepiece_model_pb2
from tiktoken_ext.openai_public import r50k_pat_str
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

DATA = Path(__file__).parent.parent / "tests" / "text" / "data"
CHARACTERS = [
    ("gemma4", "gemma4"),
    *(("gpt2", pre) for pre in ("granite-embed-multi-311m", "sarvam-moe", "whitespace")),
]

CORPUS = [
    "A penstock is a pipe that carries water from a reservoir down to a turbine.",
    "The higher the water stands above the turbine, the more power each litre gives.",
    "Gates at the top of the pipe let the keeper stop the water within a minute.",
    "When the gate shuts too fast, the water hammers and the pipe may burst.",
    "It's 3:45 pm; we've waited 12 hours, they'll come at 7, and I'm sure you're right.",
    "In 1895 the plant at Niagara sent 11,000 volts to Buffalo, 35 kilometres away.",
    "Ein Druckrohr führt das Wasser über die Höhe zur Turbine, größer ist nicht immer besser.",
    "Une conduite forcée amène l'eau à la turbine ; l'été, le débit baisse.",
    "La tubería forzada baja el agua desde el embalse hasta la turbina, ¿verdad?",
    "Вода идёт по трубе вниз, к турбине, и даёт нам электричество каждый день.",
    "水は高い所から低い所へ流れ、タービンを回します。",
    "水从高处流向低处，推动水轮机发电。",
    "물은 높은 곳에서 낮은 곳으로 흐릅니다.",
    "الماء ينزل من الخزان إلى التوربين.",
    "पानी ऊपर से नीचे बहता है।",
    "def power(head, flow):\n    return 9.81 * head * flow  # kW\n",
    "for (int i = 0; i < n; i++) {\n\ttotal += flow[i];\n}\n",
    "name = \"gate\"; open = True; count = 42; mask = 0xff00",
    "    four spaces,  two spaces,\ttab,\n\nblank line",
    "🙂 👍 🌊 ⚡ → ≈ °C µm £5 €10",
]  # fmt: skip

BOUNDARIES = [
    "a//\n b./\n/c !!\n\n\nd ;\n\n",
    "`x` ``y`` '`z`' $a+b=c^d~|e|<f>",
    "12345678 1234 (123456) 7x89 10000000",
    "end.  \n  next \n\n\n   last   ",
    "HTTPServer camelCase McDonald iPhone's IT'S it's we'LL",
    "水123水。水！「水」 a水b 가a",
]  # what families cut in different places; learnt by heart, so that a cut always shows

TEXTS = [
    *BOUNDARIES,
    "",
    " ",
    "   ",
    "\n",
    "\n\n\n \n",
    "\t\tx\r\n",
    "Hello, world!",
    " Hello",
    "  Hello   there  ",
    "The turbine turns; it's 9.81 m/s² and they've 1234567890 litres.",
    "DON'T SHOUT, I'LL LISTEN",
    "Druckrohrleitung größer als übermäßig",
    "Вода течёт вниз, 12 часов подряд.",
    "水は低い所へ流れます。水往低处流。",
    "물이 흐릅니다",
    "الماء ينزل ١٢٣",
    "पानी बहता है",
    "สวัสดีชาวโลก",
    "e\u0301 and \u00e9, ﬁne ½ Ⅷ",
    "🙂👍 👩‍👩‍👧‍👦 🇳🇴 🏳️‍🌈",
    "def f(x):\n    if x > 0:\n\t\treturn x ** 2  # ok\n    return -x\n",
    "for (int i=0;i<10;++i) a[i]<<=2; // \\n",
    "https://example.org/a?b=c&d=%20#e",
    "========----------..........",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "\x00\x01\x7f\u0080\u200b\u200d\ufeff\u2028",
    "a\u00a0b\u3000c",
    "𝔘𝕟𝕚𝕔𝕠𝕕𝕖 𒀀 \U0010fffd",
    "\ufffd\ufffd",
    "<0x41> <unk>",
]
SPECIAL_TEXTS = [
    "<|im_end|>",
    "hi<|im_end|>\n",
    "<|im_end|><|im_end|> x <|im_end|>",
    "< |im_end|> <|im_end",
    "call <tool>now</tool>",
]
TIKTOKEN_PATTERNS = {
    "gpt-2": r50k_pat_str,
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
LLAMA_CPP_FAMILIES = [
    "default",
    "gpt-2",
    "smollm",
    "llama-bpe",
    "dbrx",
    "qwen2",
    "qwen35",
    "tekken",
    "gpt-4o",
    "seed-coder",
    "bailingmoe",
    "falcon",
    "deepseek-llm",
    "deepseek-coder",
    "deepseek-v3",
    "tiny_aya",
    "kimi-k2",
    "youtu",
    "minicpm5",
    "jais-2",
    "laguna",
    "exaone-moe",
    "superbpe",
    "bloom",
    "viking",
    "chameleon",
    "afmoe",
]


def byte_level(size: int = 760) -> dict[str, Any]:
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        CORPUS + BOUNDARIES * 20, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet)
    )
    model = json.loads(library.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), "<|im_end|>", "<tool>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 4],
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
    }
    cases = {name: byte_level_cases(tokens, pattern) for name, pattern in TIKTOKEN_PATTERNS.items()}
    families = {name: family_ids(metadata, name) for name in LLAMA_CPP_FAMILIES}
    return {"metadata": metadata, "cases": cases, "texts": TEXTS + CORPUS, "families": families}


def byte_level_cases(tokens: list[str], pattern: str) -> list[dict[str, Any]]:
    ordinary, added = tokens[:-2], tokens[-2:]
    spelled = {char: bytes([byte]) for byte, char in enumerate(byte_names())}
    outside = tiktoken.Encoding(
        "outside",
        pat_str=pattern,
        mergeable_ranks={b"".join(spelled[char] for char in token): id for id, token in enumerate(ordinary)},
        special_tokens={token: len(ordinary) + i for i, token in enumerate(added)},
    )
    return [
        {
            "text": text,
            "literal": outside.encode(text, allowed_special={"<tool>"}, disallowed_special=()),
            "special": outside.encode(text, allowed_special="all"),
        }
        for text in TEXTS + SPECIAL_TEXTS
    ]


def byte_names() -> list[str]:
    """What byte-level vocabularies write for each byte: itself where it is printable, else one of 256 and up."""
    free = iter(range(256, 512))
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    return [chr(byte if byte in plain else next(free)) for byte in range(256)]


def sentence_piece(size: int = 640) -> dict[str, Any]:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        vocab_size=size,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        control_symbols=["<|im_end|>"],
        minloglevel=2,
    )
    outside = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(outside.vocab_size())
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [outside.id_to_piece(id) for id in ids],
        "tokenizer.ggml.scores": [outside.get_score(id) for id in ids],
        "tokenizer.ggml.token_type": [kind(outside, id) for id in ids],
        "tokenizer.ggml.bos_token_id": outside.bos_id(),
        "tokenizer.ggml.eos_token_id": outside.eos_id(),
        "tokenizer.ggml.unknown_token_id": outside.unk_id(),
    }
    cases = [{"text": text, "literal": outside.encode(text)} for text in TEXTS + SPECIAL_TEXTS]
    ordinary = [id for id in ids if kind(outside, id) in (1, 3)]
    answers = [random.Random(seed).choices(ordinary, k=8) for seed in range(20)]
    answers += [random.Random(seed).choices(ids[3:], k=8) for seed in range(20)]
    decoded = [{"ids": answer, "text": outside.decode(answer)} for answer in answers]
    return {"metadata": metadata, "cases": cases, "decoded": decoded}


def characters(vocabulary: dict[str, Any]) -> dict[str, Any]:
    """A SentencePiece vocabulary with merges over characters, and what llama.cpp makes of texts under each name for
    that."""
    scores = dict(zip(vocabulary["tokenizer.ggml.tokens"], vocabulary["tokenizer.ggml.scores"], strict=True))
    plain = {
        token
        for token, kind in zip(scores, vocabulary["tokenizer.ggml.token_type"], strict=True)
        if kind == 1 and len(token) > 0
    }
    merges = [
        f"{token[:cut]} {token[cut:]}"
        for token in sorted(plain, key=lambda token: (-scores[token], token))
        for cut in range(1, len(token))
        if token[:cut] in plain and token[cut:] in plain
    ]
    metadata = vocabulary | {"tokenizer.ggml.merges": merges, "tokenizer.ggml.add_bos_token": True}
    texts = [*TEXTS, *CORPUS, "\n\n", "a\n\n\nb \n", "water"]
    answers = {}
    for model, pre in CHARACTERS:
        with tempfile.TemporaryDirectory() as folder:
            named = {"tokenizer.ggml.model": model, "tokenizer.ggml.pre": pre}
            write_tiny_model(f"{folder}/tiny.gguf", metadata | named)
            fit = [text for text in texts if pre != "whitespace" or not re.search(r"\s\s", text)]  # it crashes there
            cases = llama_cpp_cases(f"{folder}/tiny.gguf", fit)
            answers[f"{model} {pre}"] = {case["text"]: case["literal"] for case in cases}
    return {"merges": merges, "answers": answers}


def unigram(size: int = 330) -> dict[str, Any]:
    """A Unigram vocabulary with a normalization of its own, and what SentencePiece and llama.cpp make of texts, where
    they agree."""
    model = io.BytesIO()
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as rules:
        rules.write(
            "".join(f"{0xFF21 + i:X}\t{0x41 + i:X}\n" for i in range(26)) + "BD\t31 2F 32\n9\t20\nA\t20\nD\t20\n"
        )
        rules.flush()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS * 3),
            model_writer=model,
            vocab_size=size,
            model_type="unigram",
            character_coverage=1.0,
            normalization_rule_tsv=rules.name,
            minloglevel=2,
        )
    outside = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    spec = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue()).normalizer_spec
    ids = range(outside.vocab_size())
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [outside.id_to_piece(id) for id in ids],
        "tokenizer.ggml.scores": [outside.get_score(id) for id in ids],
        "tokenizer.ggml.token_type": [kind(outside, id) for id in ids],
        "tokenizer.ggml.bos_token_id": outside.bos_id(),
        "tokenizer.ggml.eos_token_id": outside.eos_id(),
        "tokenizer.ggml.unknown_token_id": outside.unk_id(),
        "tokenizer.ggml.add_space_prefix": spec.add_dummy_prefix,
        "tokenizer.ggml.remove_extra_whitespaces": spec.remove_extra_whitespaces,
        "tokenizer.ggml.precompiled_charsmap": list(spec.precompiled_charsmap),
    }
    texts = [*TEXTS, *CORPUS, "ＷＡＴＥＲ  ＡＢＯＶＥ ½ litre"]
    with tempfile.TemporaryDirectory() as folder:
        key = "tokenizer.ggml.precompiled_charsmap"
        write_tiny_model(f"{folder}/tiny.gguf", metadata | {key: spec.precompiled_charsmap})
        known = [case["literal"] for case in llama_cpp_cases(f"{folder}/tiny.gguf", texts)]
    cases = [
        {"text": text, "literal": ids} for text, ids in zip(texts, known, strict=True) if outside.encode(text) == ids
    ]
    return {"metadata": metadata, "cases": cases}


def kind(outside: sentencepiece.SentencePieceProcessor, id: int) -> int:
    tests = {2: outside.is_unknown, 3: outside.is_control, 6: outside.is_byte}
    return next((number for number, test in tests.items() if test(id)), 1)


def family_ids(metadata: dict[str, Any], name: str) -> list[list[int] | None]:
    """llama.cpp's ids of each text; none where it is not to be followed."""
    texts = TEXTS + CORPUS
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/tiny.gguf"
        write_tiny_model(path, metadata | {"tokenizer.ggml.pre": name})
        cases = llama_cpp_cases(path, texts)
    return [case["literal"] if llama_cpp_is_exact(case["text"], name) else None for case in cases]


def llama_cpp_is_exact(text: str, name: str) -> bool:
    """Whether llama.cpp cuts this text as the family's own tokenizer does: it composes no characters, takes marks for
    symbols in some families, does not cut before a capital in others, and takes all white space for one character
    elsewhere."""
    if name in ("tiny_aya", "youtu", "kimi-k2") and re.search("[a-z][A-Z]", text):
        return False
    if name in ("tekken", "gpt-4o", "kimi-k2"):
        return not any(unicodedata.category(char).startswith("M") for char in text)
    if name.startswith("deepseek"):
        return not any(char.isspace() and not char.isascii() for char in text)
    return text == unicodedata.normalize("NFC", text)


def write_tiny_model(path: str, metadata: dict[str, Any], width: int = 32) -> None:
    """A model of one layer, all zeros: just enough for llama.cpp to take the vocabulary."""
    file = gguf.GGUFWriter(path, "llama")
    for name in ("context_length", "embedding_length", "feed_forward_length"):
        file.add_uint32(f"llama.{name}", width)
    for name in ("block_count", "attention.head_count"):
        file.add_uint32(f"llama.{name}", 1)
    file.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in metadata.items():
        file.add_key_value(key, value, *gguf_kind(value))
    square = [
        f"blk.0.{name}" for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    ]
    for name in square:
        file.add_tensor(f"{name}.weight", np.zeros((width, width), np.float32))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        file.add_tensor(f"{name}.weight", np.zeros(width, np.float32))
    vocabulary = len(metadata["tokenizer.ggml.tokens"])
    file.add_tensor("token_embd.weight", np.zeros((vocabulary, width), np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def gguf_kind(value: Any) -> tuple[gguf.GGUFValueType, ...]:
    kinds = {str: gguf.GGUFValueType.STRING, int: gguf.GGUFValueType.INT32, float: gguf.GGUFValueType.FLOAT32}
    if isinstance(value, bool | bytes):
        return (
            (gguf.GGUFValueType.BOOL,)
            if value in (True, False)
            else (gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT8)
        )
    if isinstance(value, list):
        return gguf.GGUFValueType.ARRAY, kinds[type(value[0])]
    return (gguf.GGUFValueType.UINT32 if isinstance(value, int) else kinds[type(value)],)


def smollm2(path: str) -> dict[str, Any]:
    return {"cases": llama_cpp_cases(path, TEXTS + SPECIAL_TEXTS + CORPUS)}


def llama_cpp_cases(path: str, texts: list[str]) -> list[dict[str, Any]]:
    parameters = xllamacpp.CommonParams()
    parameters.model.path = path
    parameters.n_ctx = 32
    parameters.port = 0
    parameters.warmup = False
    server = xllamacpp.Server(parameters)

    def ask(text: str, special: bool) -> list[int]:
        body = json.dumps({"content": text, "add_special": False, "parse_special": special}).encode()
        request = urllib.request.Request(f"{server.listening_address}/tokenize", body)
        with urllib.request.urlopen(request) as response:
            return json.load(response)["tokens"]

    return [{"text": text, "literal": ask(text, False), "special": ask(text, True)} for text in texts]


def write(name: str, content: dict[str, Any]) -> None:
    DATA.mkdir(parents=True, exist_ok=True)
    (DATA / name).write_text(json.dumps(content, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    write("byte_level.json", byte_level())
    pieces = sentence_piece()
    write("sentencepiece.json", pieces)
    write("characters.json", characters(pieces["metadata"]))
    write("unigram.json", unigram())
    write("smollm2.json", smollm2(sys.argv[1]))
