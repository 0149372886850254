"""Reads pooling, dense layers and prompt length from a sentence-transformers folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from penstock.errors import MalformedFile, UnsupportedModel
from penstock.model.classifier import Affine, DenseHead, read_activation
from penstock.model.config_reader import ConfigReader
from penstock.model.dequantize import dequantize
from penstock.model.open_files import read_json, read_list
from penstock.model.safetensors import read_safetensors
from penstock.model.spec import ClassifierSpec, ModelSpec
from penstock.model.tensor import Tensor

MODULES = "modules.json"
LIMITS = "sentence_bert_config.json"
PROMPTS = "config_sentence_transformers.json"
POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "",
    "pooling_mode_mean_sqrt_len_tokens": "",
    "pooling_mode_weightedmean_tokens": "",
}
DENSE_ACTS = {"Identity": "", "Tanh": "tanh"}
DENSE = ("dense_2", "dense_3")  # dense layers in GGUF files
DENSE_KEYS = tuple(f"{name}_feat_{side}" for name in DENSE for side in ("in", "out"))
NEUTRAL = ("word_embedding_dimension", "embedding_dimension", "include_prompt")


def with_sentence(spec: ModelSpec, folder: Path) -> ModelSpec:
    """Adds the folder's pooling and longest prompt to the spec. Vectors are always normalized to length 1."""
    if not (folder / MODULES).exists():
        return spec
    for kind, path in read_modules(folder):
        if kind == "Pooling":
            spec = replace(spec, pooling=read_pooling(ConfigReader(read_json(folder / path / "config.json"), path)))
        elif kind == "LogitScore":
            spec = replace(spec, classifier=read_token_score(folder, path))
        elif kind not in ("Transformer", "Dense", "Normalize"):
            raise UnsupportedModel(
                f"{MODULES} lists a module {kind!r} after the model; supported: Pooling, Dense, Normalize, LogitScore"
            )
    return replace(spec, max_len=min(spec.max_len, read_length(folder, spec)))


def dense_of_folder(folder: Path, width: int) -> DenseHead | None:
    layers = []
    for kind, path in read_modules(folder) if (folder / MODULES).exists() else ():
        if kind == "Dense":
            layers.append(read_dense(folder / path, width))
            width = len(layers[-1][0].weight)
    return DenseHead(tuple(layers)) if layers else None


def read_dense(folder: Path, width: int) -> tuple[Affine, str]:
    config = ConfigReader(read_json(folder / "config.json"), f"{folder.name}/config.json")
    config.require("in_features", (width,))
    shape = (config.size("out_features"), width)
    act = config.text("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if act not in DENSE_ACTS:
        raise config.unsupported("activation_function", config.text("activation_function"), DENSE_ACTS)
    stored = read_safetensors(folder / "model.safetensors")
    wanted = {"linear.weight": shape} | ({"linear.bias": shape[:1]} if config.flag("bias", True) else {})
    config.ignore("module_input_name", "module_output_name")
    config.refuse_unread(())
    if {name: tensor.shape for name, tensor in stored.items()} != wanted:
        raise MalformedFile(f"{folder.name}/model.safetensors must hold the tensors {wanted}; it holds others")
    values = {name: dequantize(tensor) for name, tensor in stored.items()}
    return Affine(values["linear.weight"], values.get("linear.bias")), DENSE_ACTS[act]


def split_dense(config: ConfigReader, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], DenseHead | None]:
    found = {name: tensors[f"{name}.weight"] for name in DENSE if f"{name}.weight" in tensors}
    for name, tensor in found.items():
        rows, width = tensor.shape if len(tensor.shape) == 2 else (0, 0)
        config.require(f"{name}_feat_in", (width,), width)
        config.require(f"{name}_feat_out", (rows,), rows)
    rest = {name: tensor for name, tensor in tensors.items() if name.removesuffix(".weight") not in found}
    layers = tuple((Affine(dequantize(tensor), None), "") for tensor in found.values())
    return rest, DenseHead(layers) if layers else None


def read_modules(folder: Path) -> list[tuple[str, str]]:
    found = []
    for module in read_list(folder / MODULES):
        match module:
            case {"type": str(kind), "path": str(path)} if ".." not in PurePosixPath(path).parts and path[:1] != "/":
                found.append((kind.rpartition(".")[2], path))
            case _:
                raise MalformedFile(f"{MODULES} must list modules with a type and a path below it; got {module!r}")
    return found


def read_pooling(config: ConfigReader) -> str:
    """Reads the pooling: cls, mean or last."""
    config.ignore(*NEUTRAL)
    modes = [key for key in POOLINGS if config.flag(key, False)]
    kind = config.text("pooling_mode", "") or "".join(POOLINGS[key] for key in modes)
    config.refuse_unread(())
    if len(modes) > 1 or kind not in ("cls", "mean", "last"):
        raise config.unsupported("pooling_mode", modes or kind, ("cls", "mean", "last"))
    return kind


def read_token_score(folder: Path, path: str) -> ClassifierSpec:
    config = ConfigReader(read_json(folder / path / "config.json"), path)
    config.require("module_input_name", ("causal_logits",), "causal_logits")
    tokens = [config.count(key, 0) for key in ("true_token_id", "false_token_id") if key in config]
    config.refuse_unread(())
    if not tokens:
        raise MalformedFile(f"{path}/config.json names no true_token_id")
    told = ConfigReader(read_json(folder / PROMPTS) if (folder / PROMPTS).exists() else {}, PROMPTS)
    return ClassifierSpec(("LABEL_0",), read_activation(told) or "sigmoid", "last", tokens=tuple(tokens))


def read_length(folder: Path, spec: ModelSpec) -> int:
    """Reads the longest prompt in tokens. A fixed prompt prefix is refused, except for generative rerankers, whose
    template has a place for it.
    """
    limits, prompts = (
        ConfigReader(read_json(folder / file) if (folder / file).exists() else {}, file) for file in (LIMITS, PROMPTS)
    )
    limits.require("do_lower_case", (False,), False)
    if "default_prompt_name" in prompts and (spec.classifier is None or spec.encoder):
        raise prompts.unsupported("default_prompt_name", prompts.text("default_prompt_name"), ("null",))
    return limits.size("max_seq_length", spec.max_len)
