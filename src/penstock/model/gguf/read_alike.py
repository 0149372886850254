"""Detects models that llama.cpp would interpret differently from their Hugging Face folder; they are not exported."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import UnsupportedModel
from penstock.model.spec import ModelSpec

WINDOWED = ("gemma2", "gemma3", "gptoss", "olmo2", "cohere2", "modernbert")  # llama.cpp supports their windows
EXAONE_LAYERS = 64  # only EXAONE 4 with this many layers has windows
COHERE_LAYERS = 64  # Command R with at least this many layers must have QK norms
ALL_BIASED = (
    "llama",
    "granite",
    "gpt2",
    "starcoder2",
    "gptoss",
    "bert",
    "distilbert",
    "nomic_bert",
    "gptneox",
    "phi2",
)  # it reads biases of all products
RENORMALIZED = ("qwen3moe", "qwen3next", "lfm2")  # it always renormalizes expert scores
NEVER_RENORMALIZED = ("qwen2moe", "olmoe")  # it never renormalizes expert scores
EACH_KV = ("dots1", "olmoe")  # it requires kv_heads == heads
SQUARE = ("glm", "qwen2")  # it requires heads * head_dim == width
UNTIED = ("minimaxm2", "olmo2", "olmoe", "stablelm", "gptneox")  # it requires an output head
LITE_LAYERS = (26, 27)  # layer counts of DeepSeek models without low-rank queries


def check_read_alike(spec: ModelSpec) -> None:
    """Raises if llama.cpp would misread or reject the file, because the family's metadata cannot express part of the
    model. bench/export.py checks these rules against llama.cpp.
    """
    for unsaid in (*unsaid_experts(spec), *unsaid_attention(spec), *unsaid_tensors(spec)):
        raise UnsupportedModel(f"a GGUF file of {spec.arch} cannot express {unsaid}")


def unsaid_attention(spec: ModelSpec) -> Iterator[str]:
    window, attn = max(one.window for one in (spec.attn, *spec.layer_attn)), spec.attn
    computed = spec.arch in WINDOWED or (spec.arch == "exaone4" and spec.layers == EXAONE_LAYERS)
    if not computed and 0 < window < spec.max_len:
        yield (
            f"sliding_window = {window}: llama.cpp computes full attention. "
            "--config sliding_window=null writes the model without a window; it then answers long prompts differently"
        )
    if spec.arch in EACH_KV and attn.kv_heads != attn.heads:
        yield (f"num_key_value_heads = {attn.kv_heads}: llama.cpp expects {attn.heads}, the number of heads")
    if spec.arch in SQUARE and attn.q_width != spec.dim:
        yield f"head_dim = {attn.head_dim}: llama.cpp expects the width, {spec.dim}, over {attn.heads} heads"
    rotated = 2 * len(attn.rope.inv_freq)
    if attn.index is not None and attn.index.head_dim != 2 * rotated:
        yield (
            f"index_head_dim = {attn.index.head_dim}: llama.cpp takes it as twice qk_rope_head_dim, which is {rotated}"
        )
    if spec.arch == "cohere" and (attn.qk_norm == "layer") != (spec.layers >= COHERE_LAYERS):
        yield (
            f"use_qk_norm = {str(bool(attn.qk_norm)).lower()} in a model of {spec.layers} layers: llama.cpp expects "
            f"such norms of {COHERE_LAYERS} layers or more, and of no others"
        )
    if spec.mla is not None and not spec.mla.q_lora_rank and spec.layers not in LITE_LAYERS:
        yield (
            f"q_lora_rank = null in a model of {spec.layers} layers: "
            f"llama.cpp expects that of models with {' or '.join(map(str, LITE_LAYERS))}"
        )


def unsaid_experts(spec: ModelSpec) -> Iterator[str]:
    experts = spec.experts
    if experts is None:
        return
    if spec.arch in RENORMALIZED and not experts.renormalize:
        yield "norm_topk_prob = false: llama.cpp always renormalizes"
    if spec.arch in NEVER_RENORMALIZED and experts.renormalize:
        yield "norm_topk_prob = true: llama.cpp never renormalizes"
    if experts.groups > 1 and experts.group_score == "max":
        yield (
            "topk_method = group_limited_greedy: llama.cpp ranks groups of experts by their two best, not by the best "
            "one"
        )
    if spec.arch == "ernie45" and spec.dense != frozenset(range(len(spec.dense))):
        yield (
            "moe_layer_interval above 1, or moe_layer_end_index before the last layer: llama.cpp expects experts in "
            "all layers after the dense ones and refuses the file"
        )


def unsaid_tensors(spec: ModelSpec) -> Iterator[str]:
    odd = sorted((spec.biases or frozenset()) & {"o", "gate", "up", "down"})
    if odd and spec.arch not in ALL_BIASED:
        said = "attention_bias" if "o" in odd else "mlp_bias"
        yield f"{said} = true: llama.cpp has no tensors for the biases of {', '.join(odd)} and refuses the file"
    if spec.arch in UNTIED and spec.tied and spec.generates:
        yield "tie_word_embeddings = true: llama.cpp expects an output head of its own and refuses the file"
