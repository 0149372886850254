"""Makes tests/models/encoders: tiny random encoders, and the hidden states that transformers computes from them in
float32, and the vectors that sentence-transformers defines as their embeddings of some texts.

Each is a Hugging Face folder (BF16) with a tokenizer and with the files that say how to pool; in some lies the
same model as a GGUF file (F16). Needs torch, transformers and gguf, as make_goldens.py does:

    python scripts/make_bert_goldens.py [NAME ...]
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from string import ascii_lowercase
from typing import Any
from zlib import crc32

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    MPNetConfig,
    MPNetForMaskedLM,
    NomicBertConfig,
    NomicBertModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
)

FOLDER = Path(__file__).parents[1] / "tests" / "models" / "encoders"
PROMPT = 48
SPECIAL = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"]  # in the order of RoBERTa, which counts positions past the pad
WORDS = ["the", "river", "##s", ".", ","]
VOCAB = [*SPECIAL, *WORDS, *ascii_lowercase, *(f"##{letter}" for letter in ascii_lowercase if letter != "s")]
TEXTS = ["The rivers, the river.", "wheels", "Ünder a bridge: a long text goes by, and by", "", "?"]
SIZES = {
    "vocab_size": len(VOCAB),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": SPECIAL.index("[PAD]"),
}
POOLING = {"bert": "mean", "roberta": "cls", "nomic": "mean", "distilbert": "mean", "mpnet": "mean"}
MPNET = {"[CLS]": "<s>", "[PAD]": "<pad>", "[SEP]": "</s>", "[MASK]": "<mask>"}  # how it spells some special tokens
LONG = 150  # tokens: MPNet's distances beyond 128 are alike
ARCHITECTURES = {"bert": "bert", "nomic": "nomic-bert", "distilbert": "bert"}
MODES = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}

GGUF_NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
    "self_attn.qkv": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "attn_output_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_mlp_layernorm": "layer_output_norm",
    "attention.q_lin": "attn_q",
    "attention.k_lin": "attn_k",
    "attention.v_lin": "attn_v",
    "attention.out_lin": "attn_output",
    "sa_layer_norm": "attn_output_norm",
    "ffn.lin1": "ffn_up",
    "ffn.lin2": "ffn_down",
    "output_layer_norm": "layer_output_norm",
}
TABLES = ("position_embd.weight", "token_types.weight")  # in 32 bits, as vectors are


def main() -> None:
    for name in sys.argv[1:] or POOLING:
        folder = FOLDER / name
        shutil.rmtree(folder, ignore_errors=True)
        model = random_model(name)
        tokens = np.random.default_rng(crc32(name.encode())).integers(len(SPECIAL), len(VOCAB), size=PROMPT)
        expected = states(model, tokens)
        check_it_matters(name, tokens, expected)
        tokenizer = wordpiece(MPNET if name == "mpnet" else {})
        vectors = [embedding(model, tokenizer.encode(text).ids, POOLING[name]) for text in TEXTS]
        write_folder(folder, name, model, tokenizer)
        if name in ARCHITECTURES:
            write_gguf(folder / "model.gguf", model, ARCHITECTURES[name])
        np.savez_compressed(
            folder / "expected.npz",
            tokens=tokens.astype(np.int32),
            states=expected,
            texts=np.array(TEXTS),
            vectors=np.stack(vectors),
            **(long_prompt(model) if name == "mpnet" else {}),
        )
        print(f"{name:8} {sum(file.stat().st_size for file in folder.rglob('*')):8} bytes")


def random_model(name: str, **changes: Any) -> PreTrainedModel:
    """Weights large enough for sharp attention, and exact in BF16 and F16 alike."""
    torch.manual_seed(crc32(name.encode()))
    eager = {"attn_implementation": "eager"}
    if name == "bert":
        model = BertModel(BertConfig(**SIZES | changes, **eager))
    elif name == "nomic":
        small = {"num_hidden_layers": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}
        model = NomicBertModel(NomicBertConfig(**SIZES | small | changes, **eager))
    elif name == "distilbert":
        own = {"dim": 36, "n_heads": 3, "n_layers": 2, "hidden_dim": 40, "max_position_embeddings": 64}
        tokens = {key: SIZES[key] for key in ("vocab_size", "pad_token_id")}
        model = DistilBertModel(DistilBertConfig(**own, **tokens, **eager))
    elif name == "mpnet":
        own = {"hidden_size": 36, "num_attention_heads": 3, "max_position_embeddings": 2 + LONG}
        model = MPNetForMaskedLM(MPNetConfig(**SIZES | own | changes))
    else:
        model = RobertaForMaskedLM(RobertaConfig(**SIZES | {"num_hidden_layers": 1, "type_vocab_size": 1}, **eager))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            gain = "norm.weight" in key.lower()
            weight.copy_(torch.randn_like(weight) * (0.2 if weight.ndim == 1 else 0.4) + gain)
            weight.copy_(weight.bfloat16().half())
    return model.float().eval()


def states(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model.base_model(torch.tensor(tokens)[None]).last_hidden_state[0].numpy()


def long_prompt(model: PreTrainedModel) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(len(SPECIAL), len(VOCAB), size=LONG)
    return {"long_tokens": tokens.astype(np.int32), "long_states": states(model, tokens)}


def embedding(model: PreTrainedModel, ids: list[int], pooling: str) -> np.ndarray:
    found = states(model, np.array(ids))
    pooled = found.mean(0) if pooling == "mean" else found[0]
    return pooled / np.linalg.norm(pooled)


def check_it_matters(name: str, tokens: np.ndarray, expected: np.ndarray) -> None:
    """What an encoder has of its own: each token sees those after it, and its gelu is not the approximate one."""
    assert np.abs(states(random_model(name), tokens[:24]) - expected[:24]).max() > 0.5
    if name == "bert":
        assert np.abs(states(random_model(name, hidden_act="gelu_new"), tokens) - expected).max() > 3e-4
    if name == "nomic":
        other = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}
        assert np.abs(states(random_model(name, **other), tokens) - expected).max() > 0.1


def wordpiece(spelled: dict[str, str]) -> Tokenizer:
    """Returns a tokenizer with some special tokens spelled otherwise."""
    special = [spelled.get(token, token) for token in SPECIAL]
    ids = {spelled.get(token, token): id for id, token in enumerate(VOCAB)}
    library = Tokenizer(models.WordPiece(vocab=ids, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=True)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    begin, end = special[0], special[2]
    library.post_processor = (
        processors.RobertaProcessing((end, ids[end]), (begin, ids[begin]))
        if spelled
        else processors.TemplateProcessing(
            single=f"{begin} $A {end}", special_tokens=[(token, ids[token]) for token in (begin, end)]
        )
    )
    library.add_special_tokens(special)
    return library


def write_folder(folder: Path, name: str, model: PreTrainedModel, tokenizer: Tokenizer) -> None:
    model.bfloat16().save_pretrained(folder)
    model.float()
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    modes = {mode: kind == POOLING[name] for kind, mode in MODES.items()}
    write_json(folder / "modules.json", modules)
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": model.config.hidden_size, **modes})
    longest = LONG if name == "mpnet" else 50
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": longest, "do_lower_case": False})


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_gguf(path: Path, model: PreTrainedModel, arch: str) -> None:
    config, writer = model.config, gguf.GGUFWriter(path, arch)
    writer.add_name(f"tiny {arch}")
    if arch == "nomic-bert":
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(getattr(config, "hidden_dim", None) or config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(getattr(config, "layer_norm_eps", 1e-12))
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_type_count(getattr(config, "type_vocab_size", 1))
    writer.add_token_list([token_text(token) for token in VOCAB])
    writer.add_token_types([3 if token in SPECIAL else 1 for token in VOCAB])
    for add, token in (
        (writer.add_pad_token_id, "[PAD]"),
        (writer.add_unk_token_id, "[UNK]"),
        (writer.add_sep_token_id, "[SEP]"),
        (writer.add_mask_token_id, "[MASK]"),
    ):
        add(VOCAB.index(token))
    for name, weight in fused(model.state_dict()).items():
        if not name.startswith("pooler."):
            theirs, values = gguf_name(name), weight.numpy()
            wide = values.ndim == 1 or theirs in TABLES
            writer.add_tensor(theirs, values.astype(np.float32 if wide else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def fused(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With q, k and v of Nomic's BERT in one tensor."""
    parts = [name for name in state if ".self_attn.q_proj" in name]
    whole = {
        name.replace("q_proj", "qkv"): torch.cat([state[name.replace("q_proj", f"{part}_proj")] for part in "qkv"])
        for name in parts
    }
    return {name: weight for name, weight in state.items() if not re.search(r"self_attn\.[qkv]_proj", name)} | whole


def token_text(token: str) -> str:
    """What begins a word is marked, not what goes on with it."""
    if token in SPECIAL:
        return token
    return token.removeprefix("##") if token.startswith("##") else f"\u2581{token}"


def gguf_name(name: str) -> str:
    stem, _, role = name.rpartition(".")
    if stem in GGUF_NAMES:
        return f"{GGUF_NAMES[stem]}.{role}"
    _, layer, part = re.split(r"\.(\d+)\.", stem)
    return f"blk.{layer}.{GGUF_NAMES[part]}.{role}"


if __name__ == "__main__":
    main()
