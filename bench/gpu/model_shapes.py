"""The models whose shapes are measured: what config.json says of each, and every tensor of its files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

Config = dict[str, Any]
ONES, EXPONENTS = "ones", "exponents"  # kinds of a Piece beside formats of numbers: BF16 and U8


class Piece(NamedTuple):
    """A tensor to be written: its names in a folder and, where there is one, in a GGUF file."""

    name: str
    shape: tuple[int, ...]
    kind: str = "BF16"
    gguf_name: str = ""


class Shape(Protocol):
    """A model's sizes. A Hugging Face folder is made of `config` and `pieces`."""

    @property
    def layers(self) -> int: ...

    @property
    def vocab(self) -> int: ...

    def config(self) -> Config:
        """Returns what config.json says."""
        ...

    def pieces(self) -> Iterator[Piece]:
        """Yields every tensor."""
        ...


def decoder(kind: str, model_type: str, shape: Any, **others: Any) -> Config:
    """Returns what config.json says of any decoder, and the others."""
    return {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": model_type,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": shape.dim,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": False,
        **others,
    }


def norm(name: str, size: int, gguf_name: str = "") -> Piece:
    return Piece(f"{name}.weight", (size,), ONES, gguf_name)


def matrix(name: str, *shape: int, gguf_name: str = "") -> Piece:
    return Piece(f"{name}.weight", shape, "BF16", gguf_name)


def attention(name: str, dim: int, q: int, kv: int) -> Iterator[Piece]:
    """Yields the matrices of attention with queries and keys of so many values."""
    yield matrix(f"{name}.q_proj", q, dim)
    yield matrix(f"{name}.k_proj", kv, dim)
    yield matrix(f"{name}.v_proj", kv, dim)
    yield matrix(f"{name}.o_proj", dim, q)


def mlp(name: str, hidden: int, dim: int) -> Iterator[Piece]:
    yield matrix(f"{name}.gate_proj", hidden, dim)
    yield matrix(f"{name}.up_proj", hidden, dim)
    yield matrix(f"{name}.down_proj", dim, hidden)


def experts(name: str, count: int, hidden: int, dim: int) -> Iterator[Piece]:
    yield matrix(f"{name}.gate", count, dim)
    for expert in range(count):
        yield from mlp(f"{name}.experts.{expert}", hidden, dim)


def ends(vocab: int, dim: int) -> Iterator[Piece]:
    yield matrix("model.embed_tokens", vocab, dim, gguf_name="token_embd.weight")
    yield norm("model.norm", dim, "output_norm.weight")
    yield matrix("lm_head", vocab, dim, gguf_name="output.weight")


@dataclass(frozen=True)
class Llama:
    """Llama-3.1-8B."""

    layers: int = 32
    dim: int = 4096
    hidden: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128256
    context: int = 131072

    def config(self) -> Config:
        return decoder(
            "Llama",
            "llama",
            self,
            intermediate_size=self.hidden,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
        )

    def pieces(self) -> Iterator[Piece]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for i in range(self.layers):
            for name, gguf_name, shape in (
                ("self_attn.q_proj", "attn_q", (q, self.dim)),
                ("self_attn.k_proj", "attn_k", (kv, self.dim)),
                ("self_attn.v_proj", "attn_v", (kv, self.dim)),
                ("self_attn.o_proj", "attn_output", (self.dim, q)),
                ("mlp.gate_proj", "ffn_gate", (self.hidden, self.dim)),
                ("mlp.up_proj", "ffn_up", (self.hidden, self.dim)),
                ("mlp.down_proj", "ffn_down", (self.dim, self.hidden)),
            ):
                yield matrix(f"model.layers.{i}.{name}", *shape, gguf_name=f"blk.{i}.{gguf_name}.weight")
            yield norm(f"model.layers.{i}.input_layernorm", self.dim, f"blk.{i}.attn_norm.weight")
            yield norm(f"model.layers.{i}.post_attention_layernorm", self.dim, f"blk.{i}.ffn_norm.weight")
        yield from ends(self.vocab, self.dim)


@dataclass(frozen=True)
class Qwen3Moe:
    """Qwen3-30B-A3B with half of its layers, in which vLLM was measured, too."""

    layers: int = 24
    dim: int = 2048
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    experts: int = 128
    chosen: int = 8
    hidden: int = 768  # of an expert
    vocab: int = 151936
    context: int = 40960

    def config(self) -> Config:
        return decoder(
            "Qwen3Moe",
            "qwen3_moe",
            self,
            attention_bias=False,
            decoder_sparse_step=1,
            intermediate_size=8 * self.hidden,
            moe_intermediate_size=self.hidden,
            mlp_only_layers=[],
            norm_topk_prob=True,
            num_experts=self.experts,
            num_experts_per_tok=self.chosen,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=1e-6,
            rope_theta=1000000.0,
        )

    def pieces(self) -> Iterator[Piece]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for i in range(self.layers):
            layer = f"model.layers.{i}"
            yield norm(f"{layer}.input_layernorm", self.dim)
            yield from attention(f"{layer}.self_attn", self.dim, q, kv)
            yield norm(f"{layer}.self_attn.q_norm", self.head_dim)
            yield norm(f"{layer}.self_attn.k_norm", self.head_dim)
            yield norm(f"{layer}.post_attention_layernorm", self.dim)
            yield from experts(f"{layer}.mlp", self.experts, self.hidden, self.dim)
        yield from ends(self.vocab, self.dim)


@dataclass(frozen=True)
class Qwen3Next:
    """Qwen3-Next-80B-A3B with a quarter of its layers: 39 GB."""

    layers: int = 12
    dim: int = 2048
    heads: int = 16
    kv_heads: int = 2
    head_dim: int = 256
    delta_k_heads: int = 16
    delta_v_heads: int = 32
    delta_dim: int = 128  # of a key and of a value
    experts: int = 512
    chosen: int = 10
    hidden: int = 512  # of an expert, and of the shared one
    vocab: int = 151936
    context: int = 262144
    kernel: int = 4
    interval: int = 4  # every so many layers, one has attention

    def config(self) -> Config:
        return decoder(
            "Qwen3Next",
            "qwen3_next",
            self,
            attention_bias=False,
            decoder_sparse_step=1,
            full_attention_interval=self.interval,
            intermediate_size=10 * self.hidden,
            linear_conv_kernel_dim=self.kernel,
            linear_key_head_dim=self.delta_dim,
            linear_value_head_dim=self.delta_dim,
            linear_num_key_heads=self.delta_k_heads,
            linear_num_value_heads=self.delta_v_heads,
            mlp_only_layers=[],
            moe_intermediate_size=self.hidden,
            shared_expert_intermediate_size=self.hidden,
            norm_topk_prob=True,
            num_experts=self.experts,
            num_experts_per_tok=self.chosen,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            partial_rotary_factor=0.25,
            rms_norm_eps=1e-6,
            rope_theta=10000000.0,
        )

    def pieces(self) -> Iterator[Piece]:
        for i in range(self.layers):
            layer = f"model.layers.{i}"
            yield norm(f"{layer}.input_layernorm", self.dim)
            yield from self.attention(layer) if i % self.interval == self.interval - 1 else self.delta_net(layer)
            yield norm(f"{layer}.post_attention_layernorm", self.dim)
            yield from experts(f"{layer}.mlp", self.experts, self.hidden, self.dim)
            yield from mlp(f"{layer}.mlp.shared_expert", self.hidden, self.dim)
            yield matrix(f"{layer}.mlp.shared_expert_gate", 1, self.dim)
        yield from ends(self.vocab, self.dim)

    def attention(self, layer: str) -> Iterator[Piece]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield matrix(f"{layer}.self_attn.q_proj", 2 * q, self.dim)  # with the gates of its output
        yield matrix(f"{layer}.self_attn.k_proj", kv, self.dim)
        yield matrix(f"{layer}.self_attn.v_proj", kv, self.dim)
        yield matrix(f"{layer}.self_attn.o_proj", self.dim, q)
        yield norm(f"{layer}.self_attn.q_norm", self.head_dim)
        yield norm(f"{layer}.self_attn.k_norm", self.head_dim)

    def delta_net(self, layer: str) -> Iterator[Piece]:
        k, v = self.delta_k_heads * self.delta_dim, self.delta_v_heads * self.delta_dim
        yield matrix(f"{layer}.linear_attn.in_proj_qkvz", 2 * k + 2 * v, self.dim)
        yield matrix(f"{layer}.linear_attn.in_proj_ba", 2 * self.delta_v_heads, self.dim)
        yield matrix(f"{layer}.linear_attn.conv1d", 2 * k + v, 1, self.kernel)
        yield Piece(f"{layer}.linear_attn.A_log", (self.delta_v_heads,), ONES)
        yield Piece(f"{layer}.linear_attn.dt_bias", (self.delta_v_heads,), ONES)
        yield norm(f"{layer}.linear_attn.norm", self.delta_dim)
        yield matrix(f"{layer}.linear_attn.out_proj", self.dim, v)


@dataclass(frozen=True)
class DeepSeekV2:
    """DeepSeek-V2-Lite: 31 GB."""

    layers: int = 27
    dim: int = 2048
    dense_hidden: int = 10944  # of the first layer
    heads: int = 16
    rank: int = 512
    nope: int = 128
    rope: int = 64
    experts: int = 64
    chosen: int = 6
    hidden: int = 1408  # of an expert; two are shared
    vocab: int = 102400
    context: int = 163840

    def config(self) -> Config:
        return decoder(
            "DeepseekV2",
            "deepseek_v2",
            self,
            attention_bias=False,
            first_k_dense_replace=1,
            intermediate_size=self.dense_hidden,
            kv_lora_rank=self.rank,
            q_lora_rank=None,
            qk_nope_head_dim=self.nope,
            qk_rope_head_dim=self.rope,
            v_head_dim=self.nope,
            moe_intermediate_size=self.hidden,
            moe_layer_freq=1,
            n_group=1,
            topk_group=1,
            n_routed_experts=self.experts,
            n_shared_experts=2,
            norm_topk_prob=False,
            num_experts_per_tok=self.chosen,
            num_key_value_heads=self.heads,
            routed_scaling_factor=1.0,
            scoring_func="softmax",
            topk_method="greedy",
            rms_norm_eps=1e-6,
            rope_theta=10000.0,
            rope_scaling={
                "type": "yarn",
                "factor": 40,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
                "original_max_position_embeddings": 4096,
            },
        )

    def pieces(self) -> Iterator[Piece]:
        for i in range(self.layers):
            layer = f"model.layers.{i}"
            yield norm(f"{layer}.input_layernorm", self.dim)
            yield matrix(f"{layer}.self_attn.q_proj", self.heads * (self.nope + self.rope), self.dim)
            yield matrix(f"{layer}.self_attn.kv_a_proj_with_mqa", self.rank + self.rope, self.dim)
            yield norm(f"{layer}.self_attn.kv_a_layernorm", self.rank)
            yield matrix(f"{layer}.self_attn.kv_b_proj", self.heads * 2 * self.nope, self.rank)
            yield matrix(f"{layer}.self_attn.o_proj", self.dim, self.heads * self.nope)
            yield norm(f"{layer}.post_attention_layernorm", self.dim)
            if not i:
                yield from mlp(f"{layer}.mlp", self.dense_hidden, self.dim)
                continue
            yield from experts(f"{layer}.mlp", self.experts, self.hidden, self.dim)
            yield from mlp(f"{layer}.mlp.shared_experts", 2 * self.hidden, self.dim)
        yield from ends(self.vocab, self.dim)


@dataclass(frozen=True)
class GptOss:
    """gpt-oss-20b, its experts in MXFP4: 13 GB."""

    layers: int = 24
    dim: int = 2880
    heads: int = 64
    kv_heads: int = 8
    head_dim: int = 64
    experts: int = 32
    chosen: int = 4
    hidden: int = 2880  # of an expert
    vocab: int = 201088
    context: int = 131072

    def config(self) -> Config:
        kept = [f"model.layers.*.{name}" for name in ("self_attn", "mlp.router")]
        return decoder(
            "GptOss",
            "gpt_oss",
            self,
            attention_bias=True,
            intermediate_size=self.hidden,
            num_local_experts=self.experts,
            num_experts_per_tok=self.chosen,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            layer_types=[("sliding_attention", "full_attention")[i % 2] for i in range(self.layers)],
            sliding_window=128,
            swiglu_limit=7.0,
            quantization_config={
                "quant_method": "mxfp4",
                "modules_to_not_convert": [*kept, "model.embed_tokens", "lm_head"],
            },
            rms_norm_eps=1e-5,
            rope_theta=150000,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
        )

    def pieces(self) -> Iterator[Piece]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for i in range(self.layers):
            layer = f"model.layers.{i}"
            yield norm(f"{layer}.input_layernorm", self.dim)
            for name, rows, width in (
                ("self_attn.q_proj", q, self.dim),
                ("self_attn.k_proj", kv, self.dim),
                ("self_attn.v_proj", kv, self.dim),
                ("self_attn.o_proj", self.dim, q),
                ("mlp.router", self.experts, self.dim),
            ):
                yield matrix(f"{layer}.{name}", rows, width)
                yield Piece(f"{layer}.{name}.bias", (rows,))
            yield Piece(f"{layer}.self_attn.sinks", (self.heads,))
            yield norm(f"{layer}.post_attention_layernorm", self.dim)
            for name, rows, width in (
                ("gate_up_proj", 2 * self.hidden, self.dim),
                ("down_proj", self.dim, self.hidden),
            ):
                blocks = (self.experts, rows, width // 32)
                yield Piece(f"{layer}.mlp.experts.{name}_blocks", (*blocks, 16), "U8")
                yield Piece(f"{layer}.mlp.experts.{name}_scales", blocks, EXPONENTS)
                yield Piece(f"{layer}.mlp.experts.{name}_bias", (self.experts, rows))
        yield from ends(self.vocab, self.dim)


SHAPES: dict[str, Shape] = {
    "llama8b": Llama(),
    "qwen3_30b_a3b": Qwen3Moe(),
    "qwen3_next": Qwen3Next(),
    "deepseek_v2_lite": DeepSeekV2(),
    "gpt_oss_20b": GptOss(),
}
TINY: dict[str, Shape] = {  # the same kinds, small enough for any machine
    "tiny": Llama(2, 256, 512, 4, 2, 64, 16384, 4096),
    "tiny_qwen3_moe": Qwen3Moe(2, 256, 4, 2, 64, 8, 2, 128, 16384, 4096),
    "tiny_qwen3_next": Qwen3Next(4, 256, 4, 2, 64, 2, 4, 32, 8, 2, 128, 16384, 4096),
    "tiny_deepseek_v2": DeepSeekV2(2, 256, 512, 4, 128, 32, 32, 8, 2, 128, 16384, 4096),
    "tiny_gpt_oss": GptOss(2, 256, 4, 2, 64, 4, 2, 256, 16384, 4096),
}
