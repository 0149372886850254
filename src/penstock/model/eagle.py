"""Reads EAGLE-3 heads, which draft for a model from its residual streams, in the layouts that vLLM and SGLang publish.

A head is one Llama layer. What it sees of a position is a projection of the target's residual streams before a few
layers, which the target's own program computes and stores, and the embedding of the token after that position. Once it
drafts, its own residual stream takes the projection's place. It chooses among fewer tokens than the target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model import config_hf, decoder, names
from penstock.model.config_fields import CHANGING, NEUTRAL
from penstock.model.config_reader import ConfigReader
from penstock.model.decoder import Attention, Ends, Mlp, Norm, rms_norm
from penstock.model.formats.checkpoint import weights_of
from penstock.model.formats.modules import integers
from penstock.model.load import CONFIG, Checkpoint, check_biases, check_heads, read_safetensors_shards
from penstock.model.open_files import read_json
from penstock.model.ops import Ops, V, Weight
from penstock.model.spec import ModelSpec, ObservedSpec
from penstock.model.tensor import Tensor
from penstock.model.weights import Packer

ARCHITECTURES = (  # one Llama layer each
    *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3MiniMaxM2ForCausalLM"),
    *("Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM"),
    *("Eagle3Speculator", "Eagle3DraftModel"),  # by vLLM's speculators, which have a layout of config.json of their own
)
SPECULATORS = "transformer_layer_config"  # where those describe the layer
SPECULATORS_FIELDS = ("speculators_config", "speculators_model_type", "speculators_version")
LAYERS = "eagle_aux_hidden_state_layer_ids"
UNOBSERVED = ("deepseek32", "gemma3n", "gemma4", "glmdsa", "opt")  # families that are no plain stack of layers
NAMING = names.Naming(
    top={"embed_tokens": "embed", "fc": "fuse", "norm": "norm", "lm_head": "head"},
    layer=names.HUGGING_FACE.layer,
    parts={**names.HUGGING_FACE.parts, "hidden_norm": "hidden_norm"},
    ignored=names.HUGGING_FACE.ignored,
)


@dataclass(frozen=True, slots=True)
class EagleSpec:
    """Describes what an EAGLE-3 head takes from its target, and what it chooses from."""

    target_dim: int
    layers: tuple[int, ...]  # of the target, before which residual streams are taken; empty: the usual three
    vocab: int  # tokens that it can draft
    norm_before_residual: bool  # its residual stream begins with what it sees after the norm, not before

    def layers_of(self, target: ModelSpec) -> tuple[int, ...]:
        """Returns the layers of a target before which residual streams are taken; one more than the last stands for the
        stream after it."""
        return self.layers or (2, target.layers // 2, target.layers - 3)


@dataclass(frozen=True, slots=True)
class EagleHead(Checkpoint):
    """Describes a head whose files are opened but not loaded."""

    eagle: EagleSpec = field(kw_only=True)
    fuse: Tensor = field(kw_only=True)  # projects the target's residual streams, one behind the other
    token_ids: tuple[int, ...] = ()  # the target's token for each of the head's; empty: the same


def is_eagle(values: Mapping[str, Any]) -> bool:
    """Returns whether a config.json is that of an EAGLE-3 head. Some name a plain Llama, which has no draft vocabulary
    elsewhere."""
    found = values.get("architectures")
    return found in [[name] for name in ARCHITECTURES] or (
        found == ["LlamaForCausalLM"] and values.get("draft_vocab_size") is not None
    )


def refuse_older(values: Mapping[str, Any], name: str) -> None:
    """Raises if a config.json is that of another kind of EAGLE head."""
    found = values.get("architectures")
    if isinstance(found, list) and any("eagle" in str(one).lower() for one in found):
        raise UnsupportedModel(
            f"{name} is a head of architecture {', '.join(map(str, found))}; of EAGLE heads these are supported, which "
            f"are EAGLE-3 with a Llama layer: {', '.join(ARCHITECTURES)}"
        )


def open_eagle(path: Path) -> EagleHead:
    """Opens the folder of an EAGLE-3 head."""
    values = read_json(path / CONFIG)
    config = ConfigReader(in_one_table(values), CONFIG)
    spec, eagle = read_eagle(config)
    files = {file_name(name): tensor for name, tensor in read_safetensors_shards(path).items()}
    token_ids = read_token_ids(files.pop("d2t", None), eagle, spec.vocab)
    files.pop("t2d", None)  # says the same the other way round
    weights = weights_of(files, ConfigReader(values, CONFIG), path)
    tensors = names.canonical(weights, NAMING, spec)
    check_heads(spec)
    check_biases(spec, tensors)
    if "fuse" not in tensors:
        raise MalformedFile(f"{path.name} has no tensor 'fc.weight', which every EAGLE-3 head has")
    return EagleHead(
        spec=spec,
        tensors=tensors,
        name=path.resolve().name,
        path=path,
        metadata=values,
        unknown=tuple(config.unknown),
        eagle=eagle,
        fuse=tensors.pop("fuse"),
        token_ids=token_ids,
    )


def file_name(name: str) -> str:
    """Returns the name that a tensor has in most files; in some its layer is the `midlayer`, and in some all but the
    output head lies within a model."""
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
    return f"model.{name}" if name.startswith("layers.") else name


def read_eagle(config: ConfigReader) -> tuple[ModelSpec, EagleSpec]:
    """Reads the config.json of a head, of which all fields are in one table."""
    config.require("num_hidden_layers", (1,))
    for key in ("fc_norm", "norm_before_fc", "norm_output", "use_aux_norm"):
        config.require(key, (False,), False)
    inner = config.table("eagle_config")
    inner.require("use_aux_hidden_state", (True,), True)
    layers = config.counts(LAYERS) or tuple(layer + 1 for layer in inner.counts(LAYERS))  # SGLang's are those before
    inner.note_unread((), {})
    config.ignore("architectures", *SPECULATORS_FIELDS)
    spec = replace(config_hf.read_decoder(config, "eagle3"), biases=config_hf.read_biases(config), tied=False)
    eagle = EagleSpec(
        target_dim=config.size("target_hidden_size", spec.dim),
        layers=layers,
        vocab=config.size("draft_vocab_size", spec.vocab),
        norm_before_residual=config.flag("norm_before_residual", False),
    )
    config.note_unread(NEUTRAL, CHANGING)
    return spec, eagle


def in_one_table(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a config.json; those of speculators describe the layer in a table of its own, and have
    another default."""
    if not isinstance(layer := values.get(SPECULATORS), dict):
        return dict(values)
    outer = {key: value for key, value in values.items() if key != SPECULATORS and value is not None}
    return {"norm_before_residual": True, **layer, **outer}


def read_token_ids(tensor: Tensor | None, eagle: EagleSpec, vocab: int) -> tuple[int, ...]:
    """Returns the target's token for each of the head's, from a tensor that has their differences."""
    if tensor is None:
        if eagle.vocab != vocab:
            raise MalformedFile(
                f"the head drafts {eagle.vocab:,} of {vocab:,} tokens, and no tensor 'd2t' says which ones"
            )
        return ()
    if tensor.shape != (eagle.vocab,):
        raise MalformedFile(
            f"tensor 'd2t' has shape {tensor.shape}; draft_vocab_size in {CONFIG} needs ({eagle.vocab},)"
        )
    found = integers(tensor, "I64", "I32").astype(np.int64) + np.arange(eagle.vocab)
    if len(beyond := found[(found < 0) | (found >= vocab)]):
        raise MalformedFile(f"tensor 'd2t' leads to token {beyond[0]}, and the target has {vocab:,} tokens")
    return tuple(found.tolist())


def problems(head: EagleHead, target: Checkpoint) -> Iterator[str]:
    """Yields reasons why a head cannot draft for a target."""
    eagle, spec = head.eagle, target.spec
    if spec.arch in UNOBSERVED:
        yield f"residual streams cannot be taken from models of the family {spec.arch} yet"
    if eagle.target_dim != spec.dim:
        yield f"it is for a model of width {eagle.target_dim}, and the width of {target.name} is {spec.dim}"
    if head.spec.vocab != spec.vocab:
        yield f"it is for a model of {head.spec.vocab:,} tokens, and {target.name} has {spec.vocab:,}"
    layers = eagle.layers_of(spec)
    if min(layers) < 0 or max(layers) > spec.layers or len(set(layers)) < len(layers):
        yield f"it takes states before layers {', '.join(map(str, layers))}, and {target.name} has {spec.layers} layers"
    if "embed" not in head.tensors and head.spec.dim != spec.dim:
        yield f"it has no embeddings, and those of {target.name} have another width"


def observed(target: Checkpoint, head: EagleHead) -> Checkpoint:
    """Returns the target as it is loaded for a head: it projects its residual streams to what the head sees."""
    seen = ObservedSpec(head.eagle.layers_of(target.spec), head.spec.dim)
    tensors = {**target.tensors, "fuse": head.fuse}
    return replace(target, spec=replace(target.spec, observed=seen), tensors=tensors, head_files=tuple(head.files))


# -- what is computed ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EagleModel:
    """Computes the logits of a head's own vocabulary from embeddings and what is stored of the position before."""

    spec: ModelSpec
    eagle: EagleSpec
    embed: Weight
    embed_norm: Norm
    hidden_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: Mlp
    norm: Norm
    head: Weight

    def forward(self, ops: Ops[V]) -> V:
        """Returns the logits of the sampled rows, [S, draft vocabulary], and stores the residual stream of those rows
        where the target will store what is seen of the next position."""
        seen = ops.load_hidden(0, self.spec.dim)
        normed, _ = self.hidden_norm(ops, seen)
        embedded, _ = self.embed_norm(ops, ops.embed(self.embed))
        x = ops.take_sampled(self.attention(ops, ops.concat(embedded, normed)))
        x, residual = self.mlp_norm(ops, x, ops.take_sampled(normed if self.eagle.norm_before_residual else seen))
        x, residual = self.norm(ops, self.mlp(ops, x), residual)
        ops.store_hidden(0, residual, ahead=1)
        return ops.linear(x, self.head, precision="float32")


def build(head: EagleHead, pack: Packer, ends: Ends) -> EagleModel:
    """Builds a head of a target with these ends, whose embeddings and output head it takes where it has none."""
    spec, dim, layer = head.spec, head.spec.dim, "layers.0"
    embed = pack.matrix(("embed", spec.vocab), width=dim) if pack.has("embed") else ends.embed
    shares_head = not pack.has("head") and (head.eagle.vocab, dim) == (ends.spec.vocab, ends.spec.dim)
    return EagleModel(
        spec,
        head.eagle,
        embed,
        rms_norm(spec, pack, f"{layer}.attn_norm"),
        rms_norm(spec, pack, f"{layer}.hidden_norm"),
        decoder.attention(spec, pack, 0, width=2 * dim),
        rms_norm(spec, pack, f"{layer}.mlp_norm"),
        decoder.mlp(spec, pack, layer, spec.hidden),
        rms_norm(spec, pack, "norm"),
        ends.head if shares_head else pack.matrix(("head", head.eagle.vocab), width=dim),
    )
