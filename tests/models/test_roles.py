"""Roles of tensors: every family gives each of its tensors one, and it decides what may be quantized on all devices."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.backend.devices import device_kind, kinds
from penstock.backend.quantize_at_load import may_quantize, quantized
from penstock.config import Config
from penstock.model import registry
from penstock.model.gguf.export import export
from penstock.model.load import open_checkpoint
from penstock.model.names import Naming, identify
from penstock.model.quantize_choice import PRECISION, choose
from penstock.model.roles import EXPERTS, MLA, ROLES, Role
from penstock.model.tensor import FORMATS, Format, Tensor

GOLDENS = Path(__file__).parent / "goldens"
NAMES = sorted(folder.name for folder in GOLDENS.iterdir())
FAMILIES = sorted({*registry.HUGGING_FACE.values(), *registry.GGUF.values()})
LAYERS = (
    *("model.layers.0.", "blk.0.", "h.0.", "encoder.layer.0.", "encoder.layers.0."),
    *("layers.0.", "decoder.layers.0.", "transformer.layer.0."),
)
SUFFIXES = (".weight", ".bias")

# what docs/quantize.md says of file names: these stay plain, and those are finer than 4 bits on a CPU and in files
PLAIN_NAMES = re.compile(
    r".*(norm|layernorm|LayerNorm|ln_\d|ln_f|ln_attn|ln_mlp|emb_ln|norm\d|norm_\d|norm_f|norms\.\d+)(\.weight)?"
    r"|.*bias.*|.*exp_probs_b.*|.*sinks.*|.*conv1d.*|.*conv\.conv\..*|.*\b(A_log|ssm_a|ssm_d|mamba\.D|mixer\.D)\b.*"
    r"|.*(mlp|block_sparse_moe|feed_forward|mixer)\.(gate|router)(\.layer|\.wg)?\.weight|.*ffn_gate_inp\.weight"
    r"|.*shared_expert_gate\.weight|.*ffn_gate_inp_shexp\.weight|.*\bindexer\..*"
    r"|.*altup\.(modality_router|prediction_coefs|correction_coefs|correct_output_scale)(\.weight)?"
    r"|.*(router\.(proj|scale|per_expert_scale)|layer_scalar|layer_output_scale|_(inp|exps)\.scale)(\.weight)?"
    r"|.*altup_(router|predict_coef|correct_coef|correct_scale)\.weight"
    r"|.*(wpe|embed_positions|position_embeddings|position_embd|token_type_embeddings|token_types)\.weight"
)
FINER_NAMES = re.compile(
    r".*(embed_tokens|embed_tokens_per_layer|per_layer_token_embd|(backbone|model)\.embeddings|embed_in|embed_out)\.weight"
    r"|.*(tok_embeddings|wte|word_embeddings|token_embd|lm_head)\.weight|output\.weight"
    r"|.*(in_proj_ba|in_proj_a|in_proj_b|ssm_ba|ssm_alpha|ssm_beta|x_proj|dt_proj|ssm_x|ssm_dt)\.weight"
    r"|.*(self_attn\.b_proj|f_a_proj|f_b_proj|ssm_f_a|ssm_f_b)\.weight"
)
HEAD_NAMES = re.compile(r".*(kv_b_proj|attn_kv_b|attn_k_b|attn_v_b)\.weight")
EXPERT_NAMES = re.compile(
    r"(?!.*\.scale).*\bexperts\b.*|.*block_sparse_moe\.(in|out)put_linear\..*|(?!.*\.scale).*_exps\..*|.*ffn_(gate|up|down)\.0\..*"
)


def file_names(naming: Naming) -> list[str]:
    """Returns a name of every tensor that files of a family may have, in layer 0 and of expert 0."""
    layer = next(prefix for prefix in LAYERS if naming.layer.fullmatch(f"{prefix}x"))
    stems = [*naming.top, *(layer + part.replace("*", "0") for part in naming.parts)]
    whole = [stem for stem in stems if stem.endswith(SUFFIXES)]
    names = whole + [stem + suffix for stem in stems if stem not in whole for suffix in SUFFIXES]
    return [name for name in names if not naming.ignored.fullmatch(name)]


def tensors_of(naming: Naming) -> dict[str, Tensor]:
    """Returns plain matrices with rows of 256 values, by the file's names, identified as a checkpoint's are."""
    matrix = Tensor("", FORMATS["BF16"], (16, 256), np.zeros(2 * 16 * 256, np.uint8))
    return {name: replace(matrix, name=name, role=identify(name, naming).role) for name in file_names(naming)}


def namings() -> list[tuple[str, Naming]]:
    return [
        (f"{name} {kind}", getattr(registry.family(name), kind))
        for name in FAMILIES
        for kind in ("HUGGING_FACE", "GGUF")
    ]


every_naming = pytest.mark.parametrize("naming", [naming for _, naming in namings()], ids=[id for id, _ in namings()])


def test_every_role_says_whether_it_may_be_quantized() -> None:
    assert PRECISION.keys() == set(Role)
    assert {*ROLES.values(), Role.BIAS} == set(Role)


@every_naming
def test_every_tensor_of_a_family_has_a_role(naming: Naming) -> None:
    names = file_names(naming)
    assert len(names) > 10
    for name in names:
        role = identify(name, naming).role
        assert (role in EXPERTS) == bool(EXPERT_NAMES.fullmatch(name) and "bias" not in name)
        assert (role in MLA) == bool(HEAD_NAMES.fullmatch(name) and "bias" not in name)


@every_naming
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_quantized_is_what_the_docs_say(naming: Naming, device: str) -> None:
    for name, tensor in tensors_of(naming).items():
        plain = PLAIN_NAMES.fullmatch(name) is not None
        if device == "cuda":
            plain |= HEAD_NAMES.fullmatch(name) is not None
        assert may_quantize(tensor, device_kind(device)) is not plain, name


@every_naming
@pytest.mark.parametrize("to", ["Q4_K", "Q4_1", "Q8_0"])
def test_formats_of_files_and_of_cpus(naming: Naming, to: str) -> None:
    tensors = tensors_of(naming)
    formats = {name: format.name for name, format in choose(tensors, to).formats.items()}
    for name in tensors:
        if PLAIN_NAMES.fullmatch(name):
            assert name not in formats, name
        else:
            assert formats[name] == ("Q6_K" if FINER_NAMES.fullmatch(name) and to != "Q8_0" else to), name


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", NAMES)
def test_weights_of_checkpoints_keep_their_roles_until_they_are_packed(name: str, device: str) -> None:
    for path in (GOLDENS / name, GOLDENS / name / "model.gguf"):
        checkpoint = open_checkpoint(path)
        assert all(tensor.role is not None for tensor in checkpoint.tensors.values())
        loaded = quantized(checkpoint, Config(model="m", device=device, quantize="q8_0", threads=1), lambda note: None)
        changed = {key for key, tensor in loaded.tensors.items() if tensor.format.name == "Q8_0"}
        for key, tensor in loaded.tensors.items():
            assert tensor.role is not None
            can_be = may_quantize(tensor, device_kind(device)) and tensor.shape[-1] % 32 == 0
            assert (key in changed) == can_be, key


@pytest.mark.parametrize("file", ["", "model.gguf"])
def test_the_gate_of_a_shared_expert_stays_plain(file: str) -> None:
    gate = open_checkpoint(GOLDENS / "qwen3next" / file).tensors["layers.0.shared.router"]
    assert gate.name in ("model.layers.0.mlp.shared_expert_gate.weight", "blk.0.ffn_gate_inp_shexp.weight")
    assert not any(may_quantize(gate, kind) for kind in kinds().values())


@pytest.mark.parametrize("name", ["qwen3next", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_files_are_written_by_the_same_table(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.text.gguf_export.text_keys", lambda path, size: {})

    def encode(tensor: Tensor, format: Format) -> Tensor:
        return tensor

    for path in (GOLDENS / name, GOLDENS / name / "model.gguf"):
        made = export(path, "q8_0", encode)
        for tensor in made.tensors:
            if PLAIN_NAMES.fullmatch(tensor.name):
                assert tensor.format.name != "Q8_0", tensor.name
            elif tensor.shape[-1] % 32 == 0:
                assert tensor.format.name == "Q8_0", tensor.name
