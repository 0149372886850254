"""Builds the multi-token prediction (MTP) head of DeepSeek V3, GLM-4.5, GLM-5, Qwen3-Next and Qwen3.5: one layer of the
model's kind over a projection of the next token's embedding and the model's hidden state.

The model and its head share embeddings and output head. While drafting, the output of the head's last norm replaces the
model's hidden state, as in vLLM, SGLang, llama.cpp and transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.model import decoder
from penstock.model.decoder import Block, Ends, Layer, Norm
from penstock.model.families import mla
from penstock.model.ops import Ops, V, Weight
from penstock.model.packer import Packer
from penstock.model.spec import ModelSpec

NAME = "layers.0"


@dataclass(frozen=True, slots=True)
class MtpHead:
    """Computes the logits of the token after the next one. Row i takes token i + 1 and the hidden state of position i,
    which the model or, while drafting, the head has stored.
    """

    ends: Ends  # the model's
    embed_norm: Norm
    hidden_norm: Norm
    project: Weight  # its input is the embedding followed by the hidden state
    layer: Layer
    norm: Norm

    def forward(self, ops: Ops[V]) -> V:
        embedding, _ = self.embed_norm(ops, self.ends.enter(ops))
        hidden, _ = self.hidden_norm(ops, ops.load_hidden(0, self.ends.spec.dim))
        x = ops.linear(ops.concat(embedding, hidden), self.project)
        x, _ = self.norm(ops, *self.layer(ops, x, None))
        rows = ops.take_sampled(x)
        ops.store_hidden(0, rows, ahead=1)
        return self.ends.logits(ops, rows)


def build(spec: ModelSpec, pack: Packer, ends: Ends) -> MtpHead:
    """Builds the head of a model with these ends. Some GGUF files have no final norm for it; the model's is used
    then.
    """
    mixer = mla.attention if spec.mla else decoder.attention
    norms = {name: decoder.rms_norm(spec, pack, f"{NAME}.{name}") for name in ("embed_norm", "hidden_norm")}
    return MtpHead(
        ends=ends,
        project=pack.matrix((f"{NAME}.eh_proj", spec.dim), width=2 * spec.dim),
        layer=Layer(
            Block(mixer(spec, pack, 0), decoder.rms_norm(spec, pack, f"{NAME}.attn_norm"), None),
            Block(decoder.mlp_or_experts(spec, pack, 0), decoder.rms_norm(spec, pack, f"{NAME}.mlp_norm"), None),
        ),
        norm=decoder.rms_norm(spec, pack, f"{NAME}.norm") if pack.has(f"{NAME}.norm") else ends.norm,
        **norms,
    )
