"""Reads and computes the head of a sequence classifier or reranker: a few products on one pooled hidden state.

The head is small and runs once per prompt, so the engine computes it with NumPy on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import erf
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.config_reader import ConfigReader
from penstock.model.dequantize import dequantize
from penstock.model.packer import Floats
from penstock.model.spec import ClassifierSpec, ModelSpec
from penstock.model.tensor import Tensor, some_rows

PARTS = {  # names in checkpoints: our names
    "bert.pooler.dense": "dense",
    "classifier.dense": "dense",
    "head.dense": "dense",
    "head.norm": "norm",
    "classifier": "out",
    "classifier.out_proj": "out",
    "score": "out",
    "cls": "dense",
    "cls.norm": "norm",
    "cls.output": "out",
}
ACTIVATIONS = {"Identity": "identity", "Sigmoid": "sigmoid"}  # torch classes in sentence-transformers configs
KEYS = (  # config.json keys of the head
    "classifier_pooling",
    "id2label",
    "label2id",
    "num_labels",
    "problem_type",
    "sbert_ce_default_activation_function",
    "sentence_transformers",
)
RANK = 4  # pooling_type of rerankers in GGUF files
RANKER_KEYS = ("pooling_type", "classifier.output_labels")
PROBLEMS = {  # problem_type: how logits become scores
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


class Affine(NamedTuple):
    """Computes x @ weight.T + bias."""

    weight: Floats  # [out, in]
    bias: Floats | None

    def __call__(self, x: Floats) -> Floats:
        y: Floats = self.weight @ x
        return y if self.bias is None else y + self.bias


class HeadNorm(NamedTuple):
    """Computes a layer norm of one vector."""

    gain: Floats
    bias: Floats | None
    eps: float

    def __call__(self, x: Floats) -> Floats:
        centered = x - x.mean()
        y: Floats = centered / np.sqrt(np.square(centered).mean() + np.float32(self.eps)) * self.gain
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True, slots=True)
class ClassifierHead:
    """Turns a pooled hidden state into a logit for each label."""

    pooling: str  # pooled state the head expects: cls, last or mean
    out: Affine
    dense: Affine | None = None
    act: str = "tanh"  # applied after `dense`
    norm: HeadNorm | None = None  # applied after `act`

    def __call__(self, state: Floats) -> Floats:
        if self.dense is not None:
            state = ACTS[self.act](self.dense(state))
        if self.norm is not None:
            state = self.norm(state)
        return self.out(state).astype(np.float32)

    def answer(self, pooled: bytes) -> bytes:
        """Returns the logits of a pooled state; both are little-endian float32."""
        return self(np.frombuffer(pooled, "<f4")).astype("<f4").tobytes()


@dataclass(frozen=True, slots=True)
class DenseHead:
    """Turns a pooled hidden state into an embedding with sentence-transformers' dense layers."""

    layers: tuple[tuple[Affine, str], ...]  # layers and their activations; "": none

    @property
    def width(self) -> int:
        return len(self.layers[-1][0].weight)

    def answer(self, pooled: bytes) -> bytes:
        """Returns the embedding of a pooled state; both are little-endian float32."""
        state = np.frombuffer(pooled, "<f4")
        for affine, act in self.layers:
            state = ACTS[act](affine(state)) if act else affine(state)
        return state.astype("<f4").tobytes()


def _gelu(x: Floats) -> Floats:
    return np.array([one * (1 + erf(one / 2**0.5)) / 2 for one in x.tolist()], np.float32)


ACTS: dict[str, Callable[[Floats], Floats]] = {"tanh": np.tanh, "gelu": _gelu}


def read_labels(config: ConfigReader, pooling: str, act: str) -> ClassifierSpec:
    """Reads the labels from a config.json. `pooling` and `act` describe the family's head."""
    names = config.table("id2label")
    count = config.size("num_labels", len(names.names()) or 2, most=2**16)
    labels = tuple(names.text(str(at), f"LABEL_{at}") for at in range(count))
    names.refuse_others(frozenset(map(str, range(count))))
    default = "sigmoid" if count == 1 else "softmax"
    problem = config.text("problem_type", "")
    if problem and problem not in PROBLEMS:
        raise config.unsupported("problem_type", problem, PROBLEMS)
    activation = _named_activation(config) or PROBLEMS.get(problem, default)
    if "classifier_pooling" in config:
        config.require("classifier_pooling", ("cls", "mean"))
    return ClassifierSpec(labels, activation, config.text("classifier_pooling", pooling), act)


def _named_activation(config: ConfigReader) -> str:
    """Reads sentence-transformers' activation name from a config.json; "" if absent."""
    table, old = config.table("sentence_transformers"), config.text("sbert_ce_default_activation_function", "")
    table.ignore("version")
    found = read_activation(table, old)
    table.refuse_unread(())
    return found


def read_activation(config: ConfigReader, otherwise: str = "") -> str:
    """Reads the torch class in `activation_fn`; "" if absent."""
    name = config.text("activation_fn", otherwise)
    kind = name.rpartition(".")[2]
    if name and kind not in ACTIVATIONS:
        raise config.unsupported("activation_fn", name, ACTIVATIONS)
    return ACTIVATIONS.get(kind, "")


def is_ranker(config: ConfigReader) -> bool:
    return "pooling_type" in config and config.count("pooling_type", 0) == RANK


def with_ranker(config: ConfigReader, spec: ModelSpec, head: Mapping[str, Tensor]) -> tuple[ModelSpec, ClassifierHead]:
    """Adds the labels in GGUF metadata to the spec and builds the head; the number of labels is the output's row count.
    With the labels yes and no, the score is the log-odds of yes.
    """
    shape = head["out.weight"].shape if "out.weight" in head else (0,)
    named = config.strings("classifier.output_labels") if "classifier.output_labels" in config else []
    labels = tuple(named) or tuple(f"LABEL_{at}" for at in range(shape[0] if len(shape) == 2 else 0))
    act = "" if "dense.weight" not in head else "gelu" if "norm.weight" in head else "tanh"
    told = ClassifierSpec(labels, "sigmoid" if len(labels) == 1 else "softmax", "cls" if spec.encoder else "last", act)
    spec = replace(spec, classifier=told, generates=False)
    built = build_head(spec, head)
    if sorted(labels) != ["no", "yes"]:
        return spec, built
    yes, no = labels.index("yes"), labels.index("no")
    weight, bias = (None if each is None else each[[yes]] - each[[no]] for each in built.out)
    assert weight is not None
    odds = replace(told, labels=("LABEL_0",), activation="sigmoid")
    return replace(spec, classifier=odds), replace(built, out=Affine(weight, bias))


def split_head(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    rest: dict[str, Tensor] = {}
    head: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, suffix = name.rpartition(".")
        if stem in PARTS and suffix in ("weight", "bias"):
            head[f"{PARTS[stem]}.{suffix}"] = tensor
        else:
            rest[name] = tensor
    return rest, head


def build_head(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> ClassifierHead:
    """Builds the head from `split_head`'s tensors; raises MalformedFile if their shapes do not match the spec."""
    told = spec.classifier
    assert told is not None
    shapes = {"out": (len(told.labels), spec.dim), "dense": (spec.dim, spec.dim), "norm": (spec.dim,)}
    values = {name: _values(name, tensor, shapes) for name, tensor in tensors.items()}
    if "out.weight" not in values:
        raise MalformedFile("the checkpoint has no tensor for the classifier; it may be truncated or of another kind")
    if told.act and "dense.weight" not in values:
        raise MalformedFile("the checkpoint has no tensor for the dense layer of its classification head")
    if not told.act and len(values.keys() - {"out.bias"}) > 1:
        raise UnsupportedModel(f"the classification head has tensors that are not computed: {', '.join(values)}")
    bias = values.get
    return ClassifierHead(
        told.pooling,
        Affine(values["out.weight"], bias("out.bias")),
        Affine(values["dense.weight"], bias("dense.bias")) if "dense.weight" in values else None,
        told.act,
        HeadNorm(values["norm.weight"], bias("norm.bias"), spec.eps) if "norm.weight" in values else None,
    )


def token_head(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> ClassifierHead:
    """Builds the head of a generative reranker: the logit of the first token in the spec minus that of the second,
    which is the log-odds. Its rows come from the output head, or from tied embeddings. `tensors` have canonical names.
    """
    assert spec.classifier is not None
    table = tensors.get("embed" if spec.tied else "head")
    if spec.logit_cap:
        raise UnsupportedModel("rerankers whose logits have a soft cap are not supported")
    if table is None or table.shape != (spec.vocab, spec.dim) or max(spec.classifier.tokens) >= spec.vocab:
        raise MalformedFile(
            f"the tokens {spec.classifier.tokens} have no rows in the output head: fetch the model again"
        )
    yes, *no = (_row(table, token) for token in spec.classifier.tokens)
    row = yes - no[0] if no else yes
    return ClassifierHead("last", Affine((row * np.float32(spec.logit_scale))[None], None), act="")


def _row(table: Tensor, at: int) -> Floats:
    row: Floats = dequantize(some_rows(table, at, at + 1))[0]
    return row


def _values(name: str, tensor: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> Floats:
    part, _, suffix = name.partition(".")
    wanted: tuple[int, ...] = shapes[part] if suffix == "weight" else shapes[part][:1]
    if tensor.shape != wanted:
        raise MalformedFile(f"tensor {tensor.name!r} has shape {tensor.shape}; the model's config needs {wanted}")
    return dequantize(tensor).reshape(wanted)


def limits_of_labels(spec: ModelSpec) -> dict[str, Any]:
    """Returns the fields of `Limits` for generation and classification."""
    generates = spec.generates and not spec.encoder
    second_text = spec.vocab if spec.token_ids > spec.vocab else 0
    told = spec.classifier
    labels = {} if told is None else {"labels": told.labels, "activation": told.activation}
    return {"generates": generates, "second_text": second_text, **labels}
