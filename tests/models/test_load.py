"""Checkpoints: what is understood, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from penstock.backend.ref import RefBackend
from penstock.errors import MalformedFile, ModelNotFound, UnsupportedModel
from penstock.model.load import Checkpoint, load_model, open_checkpoint
from penstock.model.registry import family

GOLDENS = Path(__file__).parent / "goldens"
TELL_OTHERWISE = {
    "bamba",  # its GGUF files are Granite's
    *("falcon_h1", "falcon_h1_norm"),  # their GGUF files have the multipliers in the weights
    "nemotron_h_moe",  # it has no plain MLP, so its GGUF file does not tell the width of one
}


def load(path) -> Checkpoint:
    checkpoint = open_checkpoint(path)
    load_model(checkpoint, RefBackend())
    return checkpoint


def told(checkpoint):
    """Its spec as a list, without what is a matter of the kind of file; numbers in a GGUF file have 32 bits."""

    def flat(value):
        if isinstance(value, dict):
            value = [one for key, one in value.items() if key not in ("biases", "gain_offset", "interleaved", "tiled")]
        return [leaf for one in value for leaf in flat(one)] if isinstance(value, list | tuple) else [value]

    return flat(asdict(checkpoint.spec))


@pytest.mark.parametrize("name", sorted(folder.name for folder in GOLDENS.iterdir()))
def test_both_files_tell_the_same(name: str):
    folder = GOLDENS / name
    one, other = open_checkpoint(folder), open_checkpoint(folder / "model.gguf")
    assert shapes(one) == shapes(other)
    if name not in TELL_OTHERWISE:
        assert told(one) == [pytest.approx(leaf) if type(leaf) is float else leaf for leaf in told(other)]


def shapes(checkpoint):
    """Returns the shapes of its tensors, without those that only one kind of file has split, transposed, or as a
    logarithm. An MLP may be called shared in one of them where there are no experts."""
    shared = "" if checkpoint.spec.experts is None else "shared."
    return {
        name.replace("shared.", shared): tensor.shape
        for name, tensor in checkpoint.tensors.items()
        if not name.endswith((".kv_b", ".k_b", ".v_b")) and ".delta_" not in name and ".decay" not in name
    }


def test_pairs_are_interleaved_in_files_that_turn_them(goldens):
    def interleaved(path):
        return open_checkpoint(goldens / path).spec.attn.rope.interleaved

    assert [interleaved(path) for path in ("tied", "tied/model.gguf", "qwen2", "qwen2/model.gguf")] == [0, 1, 0, 0]


def test_names_and_metadata(goldens):
    folder, file = open_checkpoint(goldens / "tied"), open_checkpoint(goldens / "tied" / "model.gguf")
    assert (folder.name, file.name) == ("tied", "tiny llama")
    assert folder.metadata["model_type"] == "llama"
    assert file.metadata["llama.block_count"] == 2


def test_tensors_are_views_of_the_files(goldens):
    for path in (goldens / "untied", goldens / "untied" / "model.gguf"):
        assert not any(tensor.data.flags.owndata for tensor in open_checkpoint(path).tensors.values())


# Tensors


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


def test_missing_tensor(gguf_with, folder_with):
    with pytest.raises(MalformedFile, match=r"no tensor for 'layers\.1\.k'"):
        load(gguf_with("linear", tensors=drop("blk.1.attn_k.weight")))
    with pytest.raises(MalformedFile, match="no tensor for 'head'"):
        load(folder_with("linear", tensors=drop("lm_head.weight")))


def test_missing_embedding(gguf_with):
    with pytest.raises(MalformedFile, match=r"no tensor 'token_embd\.weight'"):
        load(gguf_with("linear", tensors=drop("token_embd.weight")))


def test_wrong_shape(gguf_with, folder_with, floats):
    message = r"has shape \(31, 32\); the model's config needs \(32, 32\)"
    with pytest.raises(MalformedFile, match=message):
        load(gguf_with("linear", tensors=put("blk.0.attn_q.weight", floats(31, 32))))
    with pytest.raises(MalformedFile, match=message):
        load(folder_with("linear", tensors=put("model.layers.0.self_attn.q_proj.weight", floats(31, 32))))


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.attn_q_norm.weight",
        "blk.0.attn_q.scale",
        "blk.00.attn_q.weight",
        "blk.x.attn_q.weight",
        "attn_q",
        "weight",
    ],
)
def test_unknown_tensor(gguf_with, floats, name):
    with pytest.raises(UnsupportedModel, match=f"tensor named '{name}'"):
        load(gguf_with("linear", tensors=put(name, floats(4))))


def test_a_tensor_without_a_place(gguf_with, floats):
    with pytest.raises(MalformedFile, match=r"no place in this architecture: blk\.2\.attn_q"):
        load(gguf_with("linear", tensors=put("blk.2.attn_q.weight", floats(32, 32))))


def test_harmless_tensors(folder_with, floats):
    def edit(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = floats(4)

    assert "head" not in load(folder_with("tied", tensors=edit)).tensors


@pytest.mark.parametrize(
    ("tensor", "message"),
    [("model.layers.1.mlp.up_proj.bias", r"'layers\.1\.up\.bias' is missing"), (None, "is not expected")],
)
def test_biases_must_match_the_config(folder_with, tensor, message):
    edits = {"tensors": drop(tensor)} if tensor else {"config": lambda config: config.update(attention_bias=False)}
    with pytest.raises(MalformedFile, match=message):
        load(folder_with("bias", **edits))


@pytest.mark.parametrize(("shape", "value"), [((3,), 1.0), ((4,), 0.0)])
def test_damaged_rope_factors(gguf_with, floats, shape, value):
    factors = floats(*shape)
    factors.data.view("f4")[:] = value
    with pytest.raises(MalformedFile, match=r"rope_freqs\.weight"):
        load(gguf_with("llama3", tensors=put("rope_freqs.weight", factors)))


# Configs


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"architectures": ["RwkvForCausalLM"]}, UnsupportedModel, "RwkvForCausalLM.*supported: LlamaForCausalLM"),
        (
            {"architectures": ["AnArchitectureWhoseNameIsLongerThanMostForConditionalGeneration"]},
            UnsupportedModel,
            r"\['AnArchitectureWhoseNameIsLongerThanMostForConditionalGeneration'\]",
        ),
        ({"architectures": None}, MalformedFile, "config.json has no architectures"),
        ({"architectures": "LlamaForCausalLM"}, MalformedFile, "must be a list of strings"),
        (
            {"hidden_act": "gelu"},
            UnsupportedModel,
            "hidden_act = 'gelu' in config.json .* supported: silu",
        ),
        ({"quantization_config": {"bits": 4}}, UnsupportedModel, "quantization_config"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, UnsupportedModel, "rope_type = 'dynamic'"),
        ({"partial_rotary_factor": 0.25}, UnsupportedModel, "partial_rotary_factor"),
        ({"hidden_size": None}, MalformedFile, "has no hidden_size"),
        ({"hidden_size": "32"}, MalformedFile, "hidden_size in config.json must be a whole number.*got '32'"),
        ({"num_hidden_layers": 0}, MalformedFile, "num_hidden_layers"),
        ({"num_hidden_layers": True}, MalformedFile, "num_hidden_layers"),
        ({"num_hidden_layers": 2**31 - 1}, MalformedFile, "num_hidden_layers in config.json must be"),
        ({"num_hidden_layers": 5000}, MalformedFile, "no tensors of layer 2"),
        ({"head_dim": 2**30}, MalformedFile, "head_dim"),
        ({"head_dim": 7}, UnsupportedModel, "head_dim is 7"),
        ({"num_attention_heads": 64, "head_dim": None}, MalformedFile, "head_dim"),
        ({"num_key_value_heads": 3}, MalformedFile, "4 query heads cannot share 3"),
        ({"rms_norm_eps": -1e-5}, MalformedFile, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, MalformedFile, "tie_word_embeddings"),
        ({"vocab_size": 65}, MalformedFile, r"the model's config needs \(65, 32\)"),
    ],
)
def test_refused_configs(folder_with, change, error, message):
    with pytest.raises(error, match=message):
        load(folder_with("linear", config=lambda config: config.update(change)))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"general.architecture": "rwkv"}, UnsupportedModel, "general.architecture = 'rwkv'.*supported: llama"),
        ({"general.type": "adapter"}, UnsupportedModel, "is a LoRA adapter"),
        ({"general.type": "imatrix"}, UnsupportedModel, "is an importance matrix"),
        ({"general.type": "mmproj"}, UnsupportedModel, r"is the image encoder \(mmproj\)"),
        ({"general.architecture": "clip"}, UnsupportedModel, r"is the image encoder \(mmproj\)"),
        ({"llama.attention.clamp_kqv": 8.0}, UnsupportedModel, "llama.attention.clamp_kqv = 8.0"),
        ({"llama.expert_count": 8}, MalformedFile, "no llama.expert_used_count"),
        ({"llama.rope.scaling.type": "longrope"}, UnsupportedModel, "llama.rope.scaling.type = 'longrope'"),
        ({"llama.rope.dimension_count": 4}, UnsupportedModel, "llama.rope.dimension_count = 4"),
        ({"llama.attention.value_length": 16}, UnsupportedModel, "llama.attention.value_length = 16"),
        ({"llama.block_count": "two"}, MalformedFile, "llama.block_count in the GGUF metadata must be a whole number"),
        ({"llama.attention.head_count_kv": [1, 2]}, MalformedFile, "head_count_kv"),
        ({"llama.attention.key_length": 2**31}, MalformedFile, "key_length"),
        ({"llama.rope.freq_base": 0.0}, MalformedFile, "freq_base"),
        ({"llama.block_count": 3}, MalformedFile, "no tensors of layer 2"),
    ],
)
def test_refused_metadata(gguf_with, change, error, message):
    with pytest.raises(error, match=message):
        load(gguf_with("linear", metadata=lambda metadata: metadata.update(change)))


def test_missing_metadata(gguf_with):
    with pytest.raises(MalformedFile, match=r"has no llama\.block_count"):
        load(gguf_with("linear", metadata=lambda metadata: metadata.pop("llama.block_count")))


@pytest.mark.parametrize(("change", "window"), [({"sliding_window": None}, 0), ({"sliding_window": 9}, 9), ({}, 4096)])
def test_windows(folder_with, change, window):
    def edit(config):
        del config["sliding_window"]
        config.update(change)

    assert open_checkpoint(folder_with("mistral", config=edit)).spec.attn.window == window


def test_unknown_architecture():
    with pytest.raises(UnsupportedModel, match="'rwkv' is not supported; supported: llama"):
        family("rwkv")


# Files


def test_what_is_not_there(tmp_path, folder_with):
    with pytest.raises(ModelNotFound, match="no file"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(ModelNotFound, match=r"neither a config\.json nor a GGUF file"):
        open_checkpoint(tmp_path)
    folder = folder_with("tied")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"neither model\.safetensors nor"):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00", "[" * 100_000, '{"architectures": ' * 100_000])
def test_damaged_config(folder_with, text):
    folder = folder_with("tied")
    (folder / "config.json").write_text(text)
    with pytest.raises(MalformedFile, match=r"config\.json"):
        open_checkpoint(folder)


def shard_index(folder, edit):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index)
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda index: index.pop("weight_map"), "weight_map"),
        (lambda index: index.update(weight_map=["a"]), "weight_map"),
        (lambda index: index["weight_map"].update(x="../model.safetensors"), "file names in the same folder"),
        (lambda index: index["weight_map"].update(x=3), "file names in the same folder"),
        (lambda index: index["weight_map"].update(x="model-00001-of-00003.safetensors"), "disagree about tensor 'x'"),
        (lambda index: index["weight_map"].pop("lm_head.weight"), r"disagree about tensor 'lm_head\.weight'"),
    ],
)
def test_damaged_index(folder_with, edit, message):
    folder = folder_with("untied")
    shard_index(folder, edit)
    with pytest.raises(MalformedFile, match=message):
        open_checkpoint(folder)


def test_missing_shard(folder_with):
    folder = folder_with("untied")
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="model-00002-of-00003"):
        open_checkpoint(folder)


GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("header", "error", "message"),
    [
        ({"t": GOOD | {"dtype": "F64"}}, UnsupportedModel, "'t' is stored as F64"),
        ({"t": GOOD | {"dtype": 1}}, MalformedFile, "malformed entry in the header"),
        ({"t": [1]}, MalformedFile, "malformed entry in the header"),
        ({"t": GOOD | {"shape": [2, "2"]}}, MalformedFile, "shape"),
        ({"t": GOOD | {"shape": [-2, -2]}}, MalformedFile, "shape"),
        ({"t": GOOD | {"shape": [2**62, 2**62]}}, MalformedFile, "claims bytes 0 to 16"),
        ({"t": GOOD | {"data_offsets": [0, 8]}}, MalformedFile, "claims bytes 0 to 8"),
        ({"t": GOOD | {"data_offsets": [8, 24]}}, MalformedFile, "claims bytes 8 to 24 of 16"),
        ({"t": GOOD | {"data_offsets": [-16, 0]}}, MalformedFile, "claims bytes -16 to 0"),
        ({"t": GOOD}, UnsupportedModel, "tensor named 't'"),
    ],
)
def test_damaged_safetensors(folder_with, header, error, message):
    folder = folder_with("tied")
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(error, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "data", [b"", b"\x01\x00", (2**63).to_bytes(8, "little") + b"{}", bytes(8), b"\x02" + bytes(9)]
)
def test_damaged_safetensors_head(folder_with, data):
    folder = folder_with("tied")
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(MalformedFile, match=r"model\.safetensors"):
        open_checkpoint(folder)
