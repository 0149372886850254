from __future__ import annotations

import json
import random
from base64 import b64encode

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.text import Text, Tokenizer
from penstock.text.gguf_export import text_keys, token_keys
from penstock.text.gguf_tokenizer import USER_DEFINED
from penstock.text.hf_tokenizer import spec_from_folder
from penstock.text.tokenizer_spec import byte_level

CHAT = "{% for m in messages %}{{ bos_token }}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"


@pytest.fixture
def byte_level_folder(tmp_path, byte_level_vectors):
    metadata = byte_level_vectors["metadata"]
    *ordinary, end, tool = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    library = tokenizers.Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(ordinary)}, merges=merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([end])
    library.add_tokens([AddedToken(tool, normalized=False)])
    library.enable_truncation(8)
    library.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def sentencepiece_folder(tmp_path, sentencepiece_vectors):
    metadata = sentencepiece_vectors["metadata"]
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {token: id for id, token in enumerate(tokens)}
    ordinary = {token for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if kind == 1}
    merges = [
        (token[:cut], token[cut:])
        for token in sorted(ordinary, key=lambda token: -metadata["tokenizer.ggml.scores"][ids[token]])
        for cut in range(1, len(token))
        if {token[:cut], token[cut:]} <= ordinary
    ]
    library = tokenizers.Tokenizer(
        models.BPE(vocab=ids, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>", "<|im_end|>"])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    library.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def folder_with_added_spaces(sentencepiece_folder):
    """As Gemma 2 and 3 are published: runs of spaces are added tokens that are not special."""
    library = tokenizers.Tokenizer.from_file(str(sentencepiece_folder / "tokenizer.json"))
    library.add_tokens([AddedToken("▁" * count, normalized=False) for count in (2, 4)])
    library.add_tokens([AddedToken("<start▁of>", normalized=False)])
    library.save(str(sentencepiece_folder / "tokenizer.json"))
    return sentencepiece_folder


def test_tokens_decode_as_the_library_decodes_them(folder_with_added_spaces):
    tokenizer = Tokenizer.from_folder(folder_with_added_spaces)
    library = tokenizers.Tokenizer.from_file(str(folder_with_added_spaces / "tokenizer.json"))
    ids = range(library.get_vocab_size())
    whole = [id for id in ids if not library.id_to_token(id).startswith("<0x")]  # bytes of half a character differ
    draw = random.Random(0)
    runs = [[id] for id in ids] + [draw.choices(whole, k=draw.randint(2, 12)) for _ in range(500)]
    for run in runs:
        assert tokenizer.decode(run, special=True) == library.decode(run, skip_special_tokens=False)


def test_added_spaces_are_written_as_spaces(folder_with_added_spaces):
    spec = spec_from_folder(folder_with_added_spaces)
    keys = token_keys(spec, spec.size, "<unk>")
    id = spec.library.token_to_id("▁▁")
    assert (keys["tokens"][id], keys["token_type"][id]) == ("  ", USER_DEFINED)
    assert "<start of>" in keys["tokens"]


def write(folder, name, content):
    (folder / name).write_text(json.dumps(content))


def test_byte_level_folder(byte_level_folder, byte_level_vectors, byte_level):
    tokenizer = Tokenizer.from_folder(byte_level_folder)
    for case in byte_level_vectors["cases"]["gpt-2"]:
        assert tokenizer.encode(case["text"]) == case["literal"]
        assert tokenizer.encode(case["text"], special=True) == case["special"]
        assert tokenizer.decode(case["special"]) == byte_level.decode(case["special"])
    assert tokenizer.vocab_size == byte_level.vocab_size
    assert tokenizer.special_ids == byte_level.special_ids
    assert tokenizer.eos_ids == byte_level.eos_ids
    assert tokenizer.bos_id is None


def test_sentencepiece_folder(sentencepiece_folder, sentencepiece_vectors, sentencepiece):
    tokenizer = Tokenizer.from_folder(sentencepiece_folder)
    for case in sentencepiece_vectors["cases"]:
        assert tokenizer.encode(case["text"]) == case["literal"]
    for case in sentencepiece_vectors["decoded"]:
        assert tokenizer.decode(case["ids"]) == case["text"]
    assert tokenizer.bos_id == 1
    assert tokenizer.encode("water", bos=True) == sentencepiece.encode("water", bos=True)


def test_a_text_may_begin_with_two_tokens(byte_level_folder):
    """As those of GLM-4 do, whose template writes them out."""
    library = tokenizers.Tokenizer.from_file(str(byte_level_folder / "tokenizer.json"))
    library.add_special_tokens(["[gMASK]", "<sop>"])
    first, second = (library.token_to_id(token) for token in ("[gMASK]", "<sop>"))
    library.post_processor = processors.TemplateProcessing(
        single="[gMASK] <sop> $A", special_tokens=[("[gMASK]", first), ("<sop>", second)]
    )
    library.save(str(byte_level_folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(byte_level_folder)
    plain = tokenizer.encode("water")
    assert tokenizer.encode("water", bos=True) == [first, second, *plain]
    assert tokenizer.encode("[gMASK]<sop>water", special=True, bos=True) == [first, second, *plain]
    write(byte_level_folder, "tokenizer_config.json", {"add_bos_token": False})
    assert Tokenizer.from_folder(byte_level_folder).encode("water", bos=True) == plain


@pytest.mark.parametrize(("scheme", "text"), [("always", "water"), ("never", " water")])
def test_metaspace_decoder(sentencepiece_folder, scheme, text):
    library = tokenizers.Tokenizer.from_file(str(sentencepiece_folder / "tokenizer.json"))
    library.decoder = decoders.Metaspace(prepend_scheme=scheme)
    library.save(str(sentencepiece_folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(sentencepiece_folder)
    assert tokenizer.decode(tokenizer.encode("water")) == text


def test_tokenizer_config_decides_on_bos_and_eos(sentencepiece_folder):
    write(sentencepiece_folder, "tokenizer_config.json", {"add_bos_token": False, "eos_token": {"content": "</s>"}})
    tokenizer = Tokenizer.from_folder(sentencepiece_folder)
    assert tokenizer.encode("water", bos=True) == tokenizer.encode("water")
    assert 2 in tokenizer.eos_ids


@pytest.mark.parametrize(("given", "ids"), [(7, {7}), ([7, 9], {7, 9}), (None, set())])
def test_generation_config_adds_end_tokens(byte_level_folder, byte_level, given, ids):
    write(byte_level_folder, "generation_config.json", {"eos_token_id": given})
    assert Tokenizer.from_folder(byte_level_folder).eos_ids == byte_level.eos_ids | ids


@pytest.mark.parametrize(
    "given", [CHAT, [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": CHAT}]]
)
def test_template_in_tokenizer_config(sentencepiece_folder, given):
    write(sentencepiece_folder, "tokenizer_config.json", {"chat_template": given, "bos_token": "<s>"})
    text = Text.from_folder(sentencepiece_folder)
    ids = text.encode_chat([{"role": "user", "content": "hi"}])
    assert ids[0] == 1
    assert ids[1] != 1
    assert text.tokenizer.decode(ids, special=True) == "<s> user:hi<|im_end|>"


def test_template_in_a_file_of_its_own(byte_level_folder):
    write(byte_level_folder, "tokenizer_config.json", {"chat_template": "not this one"})
    (byte_level_folder / "chat_template.jinja").write_text("this one")
    text = Text.from_folder(byte_level_folder)
    assert text.tokenizer.decode(text.encode_chat([])) == "this one"


def test_without_a_template_chats_are_chatml(byte_level_folder):
    text = Text.from_folder(byte_level_folder)
    assert text.template is None
    rendered = text.render_chat([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_no_tokenizer_in_the_folder(tmp_path):
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_a_tokenizer_of_another_kind(tmp_path):
    library = tokenizers.Tokenizer(models.WordLevel(vocab={"[UNK]": 0}, unk_token="[UNK]"))
    library.decoder = decoders.CTC()
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModel, match="CTC"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_damaged_files(byte_level_folder, name, content):
    (byte_level_folder / name).write_text(content)
    with pytest.raises(MalformedFile, match=name):
        Tokenizer.from_folder(byte_level_folder)


@pytest.mark.parametrize("given", [7, [7], [{"name": "default"}], [{"name": "default", "template": 7}]])
def test_damaged_templates(byte_level_folder, given):
    write(byte_level_folder, "tokenizer_config.json", {"chat_template": given})
    with pytest.raises(MalformedFile, match="template"):
        Text.from_folder(byte_level_folder)


# ---- as GGUF metadata ----


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_a_folder_as_metadata_encodes_alike(kind, request):
    folder = request.getfixturevalue(f"{kind}_folder")
    names = {"eos_token": "<|im_end|>"} | ({"bos_token": "<s>"} if kind == "sentencepiece" else {})
    write(folder, "tokenizer_config.json", {"chat_template": CHAT, **names})
    tokenizer = Tokenizer.from_folder(folder)
    metadata = text_keys(folder, tokenizer.vocab_size + 2)
    again = Text.from_gguf(metadata)
    for text in ("Hello, world!  1234\n", "naïve ▁ ☃", "<|im_end|>", ""):
        assert again.tokenizer.encode(text, special=True, bos=True) == tokenizer.encode(text, special=True, bos=True)
    assert again.tokenizer.eos_ids == tokenizer.eos_ids
    assert metadata["tokenizer.ggml.tokens"][-1] == f"[PAD{tokenizer.vocab_size + 1}]"
    messages = [{"role": "user", "content": "Hi"}]
    assert again.render_chat(messages) == Text.from_folder(folder).render_chat(messages)


def test_what_closes_texts_is_kept(byte_level_folder):
    path = byte_level_folder / "tokenizer.json"
    library = tokenizers.Tokenizer.from_file(str(path))
    library.add_special_tokens(["<|endoftext|>"])
    end = ("<|endoftext|>", library.token_to_id("<|endoftext|>"))
    library.post_processor = processors.TemplateProcessing(single="$A <|endoftext|>", special_tokens=[end])
    library.save(str(path))
    write(byte_level_folder, "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    metadata = text_keys(byte_level_folder, 100_000)
    assert Text.from_gguf(metadata).encode_whole("Hi") == Text.from_folder(byte_level_folder).encode_whole("Hi")
    assert metadata["tokenizer.ggml.eos_token_id"] == end[1]


def test_templates_by_name_are_kept(byte_level_folder):
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "{{ tools }}"}]
    write(byte_level_folder, "tokenizer_config.json", {"chat_template": named, "eos_token": "<|im_end|>"})
    metadata = text_keys(byte_level_folder, Tokenizer.from_folder(byte_level_folder).vocab_size)
    assert metadata["tokenizer.chat_template"] == "d"
    assert metadata["tokenizer.chat_template.tool_use"] == "{{ tools }}"


def test_a_way_to_cut_text_that_has_no_name_is_refused(byte_level_folder):
    path = byte_level_folder / "tokenizer.json"
    library = tokenizers.Tokenizer.from_file(str(path))
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("a", "isolated"), pre_tokenizers.ByteLevel()])
    library.save(str(path))
    with pytest.raises(UnsupportedModel, match="no name for"):
        text_keys(byte_level_folder, 100_000)


def test_more_tokens_than_the_model_has_are_refused(byte_level_folder):
    with pytest.raises(UnsupportedModel, match="the model has logits for 5 tokens"):
        text_keys(byte_level_folder, 5)


def test_a_folder_with_a_tiktoken_model(tmp_path, byte_level_vectors):
    """As Kimi-K2 has it: ids are those of llama.cpp."""
    *ordinary, _, _ = byte_level_vectors["metadata"]["tokenizer.ggml.tokens"]
    lines = [f"{b64encode(byte_level(token)).decode()} {rank}" for rank, token in enumerate(ordinary)]
    (tmp_path / "tiktoken.model").write_text("\n".join(lines) + "\n")
    added = {str(len(ordinary) + at): {"content": text, "special": True} for at, text in ((0, "[BOS]"), (3, "[EOS]"))}
    config = {"tokenizer_class": "TikTokenTokenizer", "eos_token": "[EOS]", "added_tokens_decoder": added}
    write(tmp_path, "tokenizer_config.json", config)
    tokenizer = Tokenizer.from_folder(tmp_path)
    for text, ids in zip(byte_level_vectors["texts"], byte_level_vectors["families"]["kimi-k2"], strict=True):
        if ids is not None:
            assert tokenizer.encode(text) == ids
            assert tokenizer.decode(ids) == text
    assert tokenizer.encode("[EOS]", special=True) == [len(ordinary) + 3]
    assert len(ordinary) + 3 in tokenizer.eos_ids
    assert tokenizer.vocab_size == len(ordinary) + 256
    (tmp_path / "tiktoken.model").write_text("\n".join(lines[1:]))
    with pytest.raises(MalformedFile, match="one token for each rank from 0"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tiktoken.model").write_text("A 0 1")
    with pytest.raises(MalformedFile, match="line 1 of"):
        Tokenizer.from_folder(tmp_path)
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "OtherTokenizer"})
    with pytest.raises(UnsupportedModel, match="class 'OtherTokenizer'"):
        Tokenizer.from_folder(tmp_path)
