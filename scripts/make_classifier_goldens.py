"""Makes tests/models/classifiers: tiny random models with a classification head, and one generative reranker, with the
logits that transformers computes for some texts and pairs in float32.

Each is a Hugging Face folder (BF16) with a tokenizer; two of them have the same model as a GGUF file (F16). Needs
torch, transformers and gguf, as make_goldens.py does:

    python scripts/make_classifier_goldens.py
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from zlib import crc32

import gguf
import numpy as np
import torch
from make_bert_goldens import SIZES, SPECIAL, VOCAB, gguf_name, token_text, wordpiece, write_json
from tokenizers import Tokenizer, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Gemma2Config,
    Gemma2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

FOLDER = Path(__file__).parents[1] / "tests" / "models" / "classifiers"
PAIRS = [
    ("the river", "rivers, rivers."),
    ("a long query goes by", "b"),
    ("a", "under a bridge a long text goes by, and the river is gone"),
]
TEXTS = ["the rivers", "wheels and a river, and a wheel"]
DECODER = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
SMALL = {**SIZES, "num_hidden_layers": 1}
LABELS = {"id2label": {0: "no", 1: "maybe", 2: "yes"}, "label2id": {"no": 0, "maybe": 1, "yes": 2}}
MODERN = {
    **SIZES,
    "num_hidden_layers": 4,
    "max_position_embeddings": 64,
    "local_attention": 8,
    "global_attn_every_n_layers": 3,
    "cls_token_id": 0,
    "sep_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    },
}
QUERY_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ message.content }} . {% elif message.role == "
    "'query' %}the {{ message.content }} : {% elif message.role == 'document' %}{{ message.content }} ?{% endif %}"
    "{% endfor %}"
)
YES, NO = VOCAB.index("y"), VOCAB.index("n")


def models() -> dict[str, tuple[type[PreTrainedModel], Any]]:
    """Returns the class and the config of each golden."""
    return {
        "bert": (BertForSequenceClassification, BertConfig(**SIZES, num_labels=1)),
        "bert_labels": (BertForSequenceClassification, BertConfig(**SMALL, **LABELS)),
        "xlmr": (XLMRobertaForSequenceClassification, XLMRobertaConfig(**SMALL, type_vocab_size=1, num_labels=1)),
        "modernbert": (
            ModernBertForSequenceClassification,
            ModernBertConfig(**MODERN, num_labels=1, classifier_pooling="mean"),
        ),
        "llama": (LlamaForSequenceClassification, LlamaConfig(**DECODER, **LABELS)),
        "qwen2": (Qwen2ForSequenceClassification, Qwen2Config(**{**SMALL, "num_key_value_heads": 2}, num_labels=1)),
        "qwen3": (Qwen3ForSequenceClassification, Qwen3Config(**DECODER, num_labels=1)),
        "gemma2": (
            Gemma2ForSequenceClassification,
            Gemma2Config(**DECODER, num_labels=2, final_logit_softcapping=None),
        ),
        "yes_no": (Qwen3ForCausalLM, Qwen3Config(**DECODER, tie_word_embeddings=True)),
    }


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name, (kind, config) in models().items():
        folder = FOLDER / name
        config._attn_implementation = "eager"
        model, tokenizer = random_model(name, kind, config), joining(name)
        pairs = [rendered(*pair) if name == "yes_no" else encoded(tokenizer, *pair) for pair in PAIRS]
        expected = {
            "pairs": np.array(PAIRS),
            "texts": np.array(TEXTS),
            "pair_logits": np.stack([logits(model, *each) for each in pairs]),
            "text_logits": np.stack([logits(model, *encoded(tokenizer, text)) for text in TEXTS]),
        }
        check_it_matters(name, model, tokenizer)
        model.bfloat16().save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
        np.savez_compressed(folder / "expected.npz", **expected)
        if name == "yes_no":
            write_reranker(folder)
            write_reranker_gguf(folder / "model.gguf", model.float())
        if name == "bert":
            write_gguf(folder / "model.gguf", model.float())
        print(f"{name:12} {sum(file.stat().st_size for file in folder.rglob('*')):8} bytes")


def random_model(name: str, kind: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """Returns a model whose weights are large enough for sharp attention, and exact in BF16 and F16 alike."""
    torch.manual_seed(crc32(name.encode()))
    model = kind(config)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            gain = "norm.weight" in key.lower() and not name.startswith("gemma")
            weight.copy_(torch.randn_like(weight) * (0.2 if weight.ndim == 1 else 0.4) + gain)
            weight.copy_(weight.bfloat16().half())
    return model.float().eval()


def joining(name: str) -> Tokenizer:
    """Returns the tokenizer, which joins the texts of a pair as the family's does."""
    library = wordpiece()
    between = "[SEP] [SEP]" if name == "xlmr" else "[SEP]"
    second = 1 if name.startswith("bert") else 0
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A {between} $B:{second} [SEP]:{second}",
        special_tokens=[(token, VOCAB.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    return library


def encoded(tokenizer: Tokenizer, *texts: str) -> tuple[list[int], list[int]]:
    found = tokenizer.encode(*texts)
    return found.ids, found.type_ids


def rendered(query: str, document: str) -> tuple[list[int], list[int]]:
    """Returns the prompt of the generative reranker: what its template writes, after the first token of every text."""
    found = wordpiece().encode(f"find . the {query} : {document} ?", add_special_tokens=False)
    ids = [VOCAB.index("[CLS]"), *found.ids]
    return ids, [0] * len(ids)


def logits(model: PreTrainedModel, ids: list[int], types: list[int]) -> np.ndarray:
    given = {"input_ids": torch.tensor(ids)[None], "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    if isinstance(model, BertForSequenceClassification):
        given["token_type_ids"] = torch.tensor(types)[None]
    with torch.no_grad():
        found = model(**given).logits[0]
    if isinstance(model, Qwen3ForCausalLM):
        found = (found[-1, YES] - found[-1, NO])[None]
    return found.numpy()


def check_it_matters(name: str, model: PreTrainedModel, tokenizer: Tokenizer) -> None:
    """Checks that token types change BERT's answer, and windows ModernBERT's."""
    ids, types = encoded(tokenizer, *PAIRS[2])
    if name == "bert":
        assert np.abs(logits(model, ids, types) - logits(model, ids, [0] * len(ids))).max() > 1e-2
    if name == "modernbert":
        kind, config = models()[name]
        config.local_attention, config._attn_implementation = 128, "eager"
        wide = random_model(name, kind, config)
        assert np.abs(logits(model, ids, types) - logits(wide, ids, types)).max() > 1e-2


def write_reranker(folder: Path) -> None:
    """Writes what sentence-transformers keeps beside a generative reranker."""
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_LogitScore",
            "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
        },
    ]
    write_json(folder / "modules.json", modules)
    write_json(folder / "1_LogitScore" / "config.json", {"true_token_id": YES, "false_token_id": NO})
    told = {"activation_fn": "torch.nn.modules.activation.Sigmoid", "prompts": {"query": "find"}}
    write_json(folder / "config_sentence_transformers.json", told | {"default_prompt_name": "query"})
    (folder / "chat_template.jinja").write_text(QUERY_TEMPLATE)


def write_gguf(path: Path, model: PreTrainedModel) -> None:
    """Writes a BERT that ranks, with llama.cpp's names."""
    writer = begun(path, model, "bert")
    writer.add_layer_norm_eps(model.config.layer_norm_eps)
    writer.add_causal_attention(False)
    heads = {"bert.pooler.dense": "cls", "classifier": "cls.output"}
    tensors = {}
    for name, weight in model.state_dict().items():
        stem, _, role = name.rpartition(".")
        theirs = f"{heads[stem]}.{role}" if stem in heads else gguf_name(name.removeprefix("bert."))
        tensors[theirs] = weight
    finish(writer, tensors)


def write_reranker_gguf(path: Path, model: PreTrainedModel) -> None:
    """Writes the generative reranker as llama.cpp does: the rows of its answers are the output of a head."""
    config, writer = model.config, begun(path, model, "qwen3")
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_classifier_output_labels(["yes", "no"])
    writer.add_chat_template([{"name": "rerank", "template": "find . the {query} : {document} ?"}])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    state = model.state_dict()
    rows = state["model.embed_tokens.weight"][[YES, NO]]
    tensors = {
        names.get_name(name, try_suffixes=(".weight",)): weight
        for name, weight in state.items()
        if name != "lm_head.weight"
    }
    finish(writer, tensors | {"cls.output.weight": rows})


def begun(path: Path, model: PreTrainedModel, arch: str) -> gguf.GGUFWriter:
    """Returns a writer that has the sizes, the pooling and the tokenizer of a model."""
    config, writer = model.config, gguf.GGUFWriter(path, arch)
    writer.add_name("tiny ranker")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_pooling_type(gguf.PoolingType.RANK)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token_text(token) for token in VOCAB])
    writer.add_token_types([3 if token in SPECIAL else 1 for token in VOCAB])
    for key, token in (("pad", "[PAD]"), ("unk", "[UNK]"), ("sep", "[SEP]"), ("mask", "[MASK]")):
        getattr(writer, f"add_{key}_token_id")(VOCAB.index(token))
    return writer


def finish(writer: gguf.GGUFWriter, tensors: dict[str, torch.Tensor]) -> None:
    for name, weight in tensors.items():
        wide = weight.ndim == 1 or name in ("position_embd.weight", "token_types.weight")
        writer.add_tensor(name, weight.numpy().astype(np.float32 if wide else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
