"""Defines the roles of tensors. A tensor gets its role with its canonical name, and keeps it until it is packed."""

from __future__ import annotations

from enum import Enum

from penstock.model.spec import ATTENTION_VECTORS


class Role(Enum):
    """Names a tensor's function in the model.

    Tensor parallelism divides the rows (outputs) of `*_IN` weights and the columns (inputs) of `*_OUT` weights.
    """

    EMBEDDING = "token embedding"
    POSITIONS = "table of positions or token types"
    HEAD = "output head"
    EMBEDDING_PROJECTION = "projection of embeddings, or back"
    ATTENTION_IN = "attention projection in"
    ATTENTION_OUT = "attention projection out"
    MLA_KV_B = "MLA kv_b, keys and values of all heads"
    MLA_HEADS = "MLA matrix for each head"
    INDEX = "index of sparse attention"
    MLP_IN = "MLP in"
    MLP_OUT = "MLP out"
    EXPERT_IN = "expert in"
    EXPERT_OUT = "expert out"
    ROUTER = "router"
    SHARED_EXPERT_GATE = "gate of the shared expert"
    DELTA_IN = "delta net in"
    DELTA_OUT = "delta net out"
    DELTA_GATES = "delta net gates"
    DELTA_NORM = "norm of a delta net's output"
    CONV_IN = "gated convolution in"
    CONV_OUT = "gated convolution out"
    SSM_IN = "state space layer in"
    SSM_OUT = "state space layer out"
    SSM_STEP = "Mamba's projections to time steps, b and c"
    SSM_NORM = "norm of a state space layer's output"
    CONV = "convolution"
    NORM = "norm"
    BIAS = "bias"
    PER_LAYER_EMBEDDING = "table of per-layer embeddings"
    PER_LAYER_IN = "per-layer input in"
    PER_LAYER_OUT = "per-layer input out"
    STREAM_PROJECTION = "projection into or out of a residual stream"
    STREAM_COEFFICIENTS = "coefficients of residual streams"
    LAUREL = "low-rank product beside attention"
    SCALE = "factor of each value, or of a layer"
    ROUTER_BIAS = "bias of the choice of experts"
    HEAD_PARAMETER = "a few numbers for each head"


EXPERTS = frozenset((Role.EXPERT_IN, Role.EXPERT_OUT))
MLA = frozenset((Role.MLA_KV_B, Role.MLA_HEADS))

STREAMS = tuple(f".{i}" for i in range(7))  # suffixes of per-stream tensors, for up to eight residual streams

_PARTS = {
    Role.EMBEDDING: ("embed",),
    Role.POSITIONS: ("positions", "types"),
    Role.HEAD: ("head",),
    Role.EMBEDDING_PROJECTION: ("project_in", "project_out", "eh_proj"),
    Role.ATTENTION_IN: ("q", "k", "v", "qkv", "grouped_qkv", "q_a", "q_b", "kv_a", "latent", "k_rope"),
    Role.INDEX: ("index_q", "index_k", "index_weights"),
    Role.ATTENTION_OUT: ("o",),
    Role.MLA_KV_B: ("kv_b",),
    Role.MLA_HEADS: ("k_b", "v_b"),
    Role.MLP_IN: ("gate", "up", "gate_up", "shared.gate", "shared.up", "shared.gate_up", "latent_in"),
    Role.MLP_OUT: ("down", "shared.down", "latent_out"),
    Role.EXPERT_IN: (
        *("experts.gate", "experts.up", "experts.gate_up", "experts.*.gate", "experts.*.up"),
        *("experts.interleaved", "experts.interleaved_transposed", "experts.gate_up_either"),
        "experts.gate_up_transposed",
    ),
    Role.EXPERT_OUT: ("experts.down", "experts.*.down", "experts.down_transposed", "experts.down_either"),
    Role.ROUTER: ("router",),
    Role.SHARED_EXPERT_GATE: ("shared.router",),
    Role.DELTA_IN: ("delta_qkvz", "delta_qkv", "delta_z", "delta_z_in", "delta_z_out"),
    Role.DELTA_OUT: ("delta_o",),
    Role.DELTA_GATES: ("delta_ba", "delta_b", "delta_a", "delta_a_in", "delta_a_out"),
    Role.DELTA_NORM: ("delta_norm",),
    Role.CONV_IN: ("conv_in",),
    Role.CONV_OUT: ("conv_o",),
    Role.SSM_IN: ("ssm_in",),
    Role.SSM_OUT: ("ssm_out",),
    Role.SSM_STEP: ("ssm_x", "ssm_dt"),
    Role.SSM_NORM: ("ssm_norm",),
    Role.CONV: ("conv", "conv_q", "conv_k", "conv_v"),
    Role.NORM: (
        *("norm", "embed_norm", "hidden_norm", "attn_norm", "mlp_norm", "after_attn_norm", "after_mlp_norm"),
        *("q_norm", "k_norm", "kv_norm", "index_norm", "q_norm.*", "k_norm.*", "dt_norm", "b_norm", "c_norm"),
        *("per_layer_norm", "after_per_layer_norm", "laurel_norm", "stream_router_norm"),
        *("experts_norm", "after_dense_norm", "after_experts_norm"),
    ),
    Role.PER_LAYER_EMBEDDING: ("per_layer_embed",),
    Role.PER_LAYER_IN: ("per_layer_in", "per_layer_gate"),
    Role.PER_LAYER_OUT: ("per_layer_out",),
    Role.STREAM_PROJECTION: (
        *(f"{end}{i}" for end in ("stream_in", "stream_out") for i in ("", *STREAMS)),
        "fuse",
    ),
    Role.STREAM_COEFFICIENTS: ("stream_router", "stream_predict", "stream_correct"),
    Role.LAUREL: ("laurel_in", "laurel_out"),
    Role.SCALE: ("stream_scale", "layer_scale", "router_scale", "expert_scale"),
    Role.ROUTER_BIAS: ("choice_bias",),
    Role.HEAD_PARAMETER: (*ATTENTION_VECTORS, "decay", "decay_log", "dt", "skip"),
}
ROLES = {part: role for role, parts in _PARTS.items() for part in parts}  # canonical part name: role
BIAS = ".bias"  # suffix of a bias's canonical name


def role_of(part: str) -> Role:
    """Returns the role of a part, given its canonical name within a layer; "*" stands for an expert's number."""
    return Role.BIAS if part.endswith(BIAS) else ROLES[part]
