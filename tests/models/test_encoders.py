"""Tiny encoders against the states that transformers computed and the vectors that sentence-transformers defines
(scripts/make_bert_goldens.py); what their folders say, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock import LLM
from penstock.backend.batches import Chunk, greedy_batch
from penstock.backend.cpu import CpuBackend
from penstock.backend.cpu._native import isas
from penstock.backend.ref import RefBackend
from penstock.errors import ConfigError, ContextTooLong, InvalidRequest, MalformedFile, UnsupportedModel
from penstock.model.dequantize import dequantize
from penstock.model.load import Checkpoint, check_biases, load_model, open_checkpoint
from penstock.model.safetensors import read_safetensors
from penstock.model.tensor import FORMATS, Tensor
from penstock.text.embedding import pooling_of
from penstock.types import Limits
from tests.models.config_json import read_config

ENCODERS = Path(__file__).parent / "encoders"
FILES = {
    "bert": ENCODERS / "bert",
    "bert gguf": ENCODERS / "bert" / "model.gguf",
    "roberta": ENCODERS / "roberta",
    "nomic": ENCODERS / "nomic",
    "nomic gguf": ENCODERS / "nomic" / "model.gguf",
    "distilbert": ENCODERS / "distilbert",
    "distilbert gguf": ENCODERS / "distilbert" / "model.gguf",
    "mpnet": ENCODERS / "mpnet",
}
BACKENDS: dict[str, Callable[[], Any]] = {"ref": RefBackend} | {
    isa: lambda isa=isa: CpuBackend(2, isa=isa, kv="f32") for isa in isas()
}
BLOCK_SIZE = 16
TOLERANCES = {"distilbert": 3e-5}  # transformers itself is 1.8e-5 off what it computes in float64
each_file = pytest.mark.parametrize("name", FILES)


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(ENCODERS / name.split()[0] / "expected.npz") as file:
        return dict(file)


def loaded(backend: Any, path: Path) -> Any:
    backend.load(load_model(open_checkpoint(path), backend))
    return backend


def states(backend: Any, *prompts: list[int], seed: int = 0) -> list[np.ndarray]:
    """Of all prompts in one step, in blocks all over the cache."""
    sizes = [-(-len(prompt) // BLOCK_SIZE) for prompt in prompts]
    backend.reserve_kv(sum(sizes), BLOCK_SIZE)
    tables = np.split(np.random.default_rng(seed).permutation(sum(sizes)), np.cumsum(sizes)[:-1])
    chunks = [
        Chunk(prompt, 0, table.tolist(), i) for i, (prompt, table) in enumerate(zip(prompts, tables, strict=True))
    ]
    return np.split(backend.logits(greedy_batch(chunks)), np.cumsum([len(prompt) for prompt in prompts])[:-1])


# -- what is computed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", BACKENDS)
@each_file
def test_states_are_those_of_transformers_whatever_is_beside_them(name: str, device: str):
    expected = golden(name)
    tokens = expected["tokens"].tolist()
    backend = loaded(BACKENDS[device](), FILES[name])
    [alone] = states(backend, tokens)
    assert np.abs(alone - expected["states"]).max() < TOLERANCES.get(name.split()[0], 1e-5)
    others = [tokens[:1], tokens[5:40], tokens[::-1]]
    one, short, middle, reverse = states(backend, tokens, *others, seed=1)
    assert np.abs(one - alone).max() < 1e-5
    for got, prompt in zip((short, middle, reverse), others, strict=True):
        assert np.abs(got - states(backend, prompt)[0]).max() < 1e-5


def vectors_of(outputs):
    return np.stack([output.outputs.vector for output in outputs])


@pytest.mark.parametrize("device", ["ref", "cpu"])
@each_file
def test_texts_become_the_vectors_of_sentence_transformers(name: str, device: str):
    expected = golden(name)
    with LLM(FILES[name], device=device, threads=2) as llm:
        vectors = vectors_of(llm.embed(expected["texts"].tolist()))
        one_by_one = [vectors_of(llm.embed(text))[0] for text in expected["texts"].tolist()]
        assert llm._engine.inner.engine.stats().blocks_cached == 0
    assert np.abs(vectors - expected["vectors"]).max() < 1e-5
    assert np.abs(np.stack(one_by_one) - vectors).max() <= (1e-6 if device == "ref" else 0)


def test_pooling_can_be_chosen():
    expected = golden("bert")
    tokens = expected["tokens"].tolist()
    wanted = {"mean": expected["states"].mean(0), "cls": expected["states"][0], "last": expected["states"][-1]}
    with LLM(FILES["bert"], device="cpu", threads=2) as llm:
        for kind, state in wanted.items():
            assert np.abs(vectors_of(llm.embed(tokens, pooling=kind))[0] - state / np.linalg.norm(state)).max() < 1e-5
        with pytest.raises(InvalidRequest, match="pooling must be mean, last or cls; got 'max'"):
            llm.embed(tokens, pooling="max")


def test_quantized_weights_find_their_rows_prepared():
    checkpoint = open_checkpoint(FILES["bert gguf"])
    coded = {
        name: replace(
            tensor,
            format=FORMATS["Q8_0"],
            source=gguf.quantize(dequantize(tensor), gguf.GGMLQuantizationType.Q8_0).reshape(-1),
        )
        if len(tensor.shape) == 2 and tensor.shape[1] % 32 == 0
        else tensor
        for name, tensor in checkpoint.tensors.items()
    }
    tokens = golden("bert")["tokens"].tolist()
    answers = []
    for backend in (CpuBackend(2, kv="f32"), RefBackend()):
        backend.load(load_model(replace(checkpoint, tensors=coded), backend))
        answers += states(backend, tokens)
    assert np.square(answers[0] - answers[1]).mean() < 0.01 * np.square(answers[1]).mean()


def test_layers_share_one_cache():
    checkpoint, backend = open_checkpoint(FILES["bert"]), loaded(RefBackend(), FILES["bert"])
    told = backend.footprint(checkpoint.spec, checkpoint.tensors.values()).kv_token
    assert backend.memory_needs().kv_bytes_per_token == told == 2 * 4 * 32
    exact = loaded(CpuBackend(1, kv="f32"), FILES["bert"])
    assert exact.memory_needs().kv_bytes_per_token == 4 * 4 * (8 + 16)  # values are padded


# -- what cannot be asked -----------------------------------------------------------------------------------------


def test_it_makes_no_text():
    with LLM(FILES["bert"], device="cpu", threads=1) as llm:
        for ask in (lambda: llm.generate("the"), lambda: llm.chat([{"role": "user", "content": "the"}])):
            with pytest.raises(InvalidRequest, match="an encoder, which returns embeddings and no text"):
                ask()
        (choice,) = llm._maker.pooling("the", None).choices
        with pytest.raises(InvalidRequest, match="makes embeddings and no text"):
            llm._engine.inner.engine.add(choice.request._replace(pooling=""))


def test_texts_beyond_the_context_are_refused_with_both_numbers():
    with LLM(FILES["bert"], device="cpu", threads=1, step_tokens=20, max_rows=4) as llm:
        assert llm.embed("a " * 18)[0].outputs.hidden_size == 32
        with pytest.raises(ContextTooLong, match="prompt has 21 tokens and the context holds 20"):
            llm.embed("a " * 19)
    with pytest.raises(ConfigError, match="max_len 51 is beyond the model's context of 50 tokens"):
        LLM(FILES["bert"], device="cpu", threads=1, max_len=51)


def test_the_first_token_of_a_decoder_has_seen_nothing():
    decoder = Limits(max_len=8, max_rows=1, step_tokens=8, block_size=4, num_blocks=2, vocab=10, pooling="last")
    with pytest.raises(InvalidRequest, match="pooling cls works only with encoders"):
        pooling_of("cls", decoder)
    assert [pooling_of(asked, decoder) for asked in (None, "mean")] == ["last", "mean"]
    assert pooling_of("cls", decoder._replace(encoder=True)) == "cls"


# -- what folders say ---------------------------------------------------------------------------------------------

MINILM = {
    "_name_or_path": "nreimers/MiniLM-L6-H384-uncased",
    "architectures": ["BertModel"],
    "attention_probs_dropout_prob": 0.1,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 384,
    "initializer_range": 0.02,
    "intermediate_size": 1536,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 6,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "transformers_version": "4.8.2",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 30522,
}
BGE_SMALL = MINILM | {
    "classifier_dropout": None,
    "id2label": {"0": "LABEL_0"},
    "label2id": {"LABEL_0": 0},
    "num_hidden_layers": 12,
    "torch_dtype": "float32",
}
LABSE = BGE_SMALL | {
    "directionality": "bidi",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "pooler_fc_size": 768,
    "pooler_num_attention_heads": 12,
    "pooler_num_fc_layers": 3,
    "pooler_size_per_head": 128,
    "pooler_type": "first_token_transform",
    "vocab_size": 501153,
}
BGE_M3 = MINILM | {
    "architectures": ["XLMRobertaModel"],
    "bos_token_id": 0,
    "classifier_dropout": None,
    "eos_token_id": 2,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 8194,
    "model_type": "xlm-roberta",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "output_past": True,
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "vocab_size": 250002,
}


DISTILBERT = {  # as sentence-transformers/multi-qa-distilbert-cos-v1 has it
    "activation": "gelu",
    "architectures": ["DistilBertForMaskedLM"],
    "attention_dropout": 0.1,
    "dim": 768,
    "dropout": 0.1,
    "hidden_dim": 3072,
    "initializer_range": 0.02,
    "max_position_embeddings": 512,
    "model_type": "distilbert",
    "n_heads": 12,
    "n_layers": 6,
    "pad_token_id": 0,
    "qa_dropout": 0.1,
    "seq_classif_dropout": 0.2,
    "sinusoidal_pos_embds": False,
    "tie_weights_": True,
    "vocab_size": 30522,
}


def test_published_configs():
    for config, shape in (
        (MINILM, (6, 384, 12, 32, 512, 0)),
        (BGE_SMALL, (12, 384, 12, 32, 512, 0)),
        (LABSE, (12, 768, 12, 64, 512, 0)),
        (BGE_M3, (24, 1024, 16, 64, 8192, 2)),
        (DISTILBERT, (6, 768, 12, 64, 512, 0)),
        (BGE_M3 | {"pad_token_id": 0}, (24, 1024, 16, 64, 8193, 1)),
    ):
        spec = read_config(config)
        a = spec.attn
        assert (spec.layers, spec.dim, a.heads, a.head_dim, spec.max_len, spec.first_position) == shape
        assert (spec.encoder, spec.act, len(spec.cached_attention)) == (True, "gelu", 1)


NOMIC = {
    "activation_function": "swiglu",
    "architectures": ["NomicBertModel"],
    "attn_pdrop": 0.0,
    "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
    "bos_token_id": None,
    "causal": False,
    "dense_seq_output": True,
    "embd_pdrop": 0.0,
    "eos_token_id": None,
    "fused_bias_fc": True,
    "fused_dropout_add_ln": True,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 2048,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "model_type": "nomic_bert",
    "n_embd": 768,
    "n_head": 12,
    "n_inner": 3072,
    "n_layer": 12,
    "n_positions": 8192,
    "pad_vocab_size_multiple": 64,
    "parallel_block": False,
    "parallel_block_tied_norm": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "reorder_and_upcast_attn": False,
    "resid_pdrop": 0.0,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "summary_activation": None,
    "summary_first_dropout": 0.0,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "torch_dtype": "float32",
    "transformers_version": "4.37.2",
    "type_vocab_size": 2,
    "use_cache": True,
    "use_flash_attn": True,
    "use_rms_norm": False,
    "use_xentropy": True,
    "vocab_size": 30528,
}


def test_nomic_in_its_first_words_and_in_those_of_transformers(folder: Path):
    spec = read_config(NOMIC)
    assert (spec.layers, spec.dim, spec.attn.heads, spec.hidden, spec.max_len) == (12, 768, 12, 3072, 2048)
    assert (spec.encoder, spec.act, spec.attn.rope.inv_freq[1]) == (True, "silu", 1000 ** (-2 / 64))
    for change in ({"qkv_proj_bias": True}, {"causal": True}, {"prenorm": True}, {"rotary_emb_scale_base": 512}):
        with pytest.raises(UnsupportedModel, match=f"{next(iter(change))} = "):
            read_config(NOMIC | change)
    with pytest.raises(UnsupportedModel, match="moe_every_n_layers = 2"):
        read_config(NOMIC | {"moe_every_n_layers": 2})
    shutil.rmtree(folder)
    shutil.copytree(FILES["nomic"], folder)
    told = open_checkpoint(folder).spec
    first = {"n_embd": 32, "n_head": 4, "n_inner": 48, "n_layer": 1, "n_positions": 64, "rotary_emb_base": 50}
    (folder / "config.json").write_text(json.dumps(NOMIC | first | {"vocab_size": told.vocab}))
    assert open_checkpoint(folder).spec == told


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_decoder": True}, "is_decoder = True"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
        ({"hidden_act": "mish"}, "hidden_act = 'mish'"),
        ({"rotary_emb_base": 1000}, "rotary_emb_base = 1000"),
        ({"architectures": ["BertForQuestionAnswering"]}, "architectures = .*BertForQuest"),
    ],
)
def test_what_is_computed_otherwise_is_refused(change: dict[str, Any], message: str):
    with pytest.raises(UnsupportedModel, match=message):
        read_config(MINILM | change)
    with pytest.raises(MalformedFile, match="384 dimensions cannot be shared evenly by 5 heads"):
        read_config(MINILM | {"num_attention_heads": 5})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(FILES["bert"], tmp_path / "bert")
    return tmp_path / "bert"


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_says_how_to_pool_and_how_much(folder: Path):
    spec = open_checkpoint(folder).spec
    assert (spec.pooling, spec.max_len) == ("mean", 50)
    rewrite(folder / "1_Pooling" / "config.json", pooling_mode_mean_tokens=False, pooling_mode_lasttoken=True)
    assert open_checkpoint(folder).spec.pooling == "last"
    (folder / "sentence_bert_config.json").unlink()
    assert open_checkpoint(folder).spec.max_len == 64
    (folder / "modules.json").unlink()
    spec = open_checkpoint(folder).spec
    assert (spec.pooling, spec.max_len) == ("mean", 64)
    assert open_checkpoint(FILES["roberta"]).spec.pooling == "cls"


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling_mode = .*mean, last"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, "pooling_mode = ''"),
        ("1_Pooling/config.json", {"pooling_mode_new": True}, "pooling_mode_new = True"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case = True"),
    ],
)
def test_other_poolings_are_refused(folder: Path, file: str, changes: dict[str, Any], message: str):
    rewrite(folder / file, **changes)
    with pytest.raises(UnsupportedModel, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("modules", "error", "message"),
    [
        (
            [{"path": "2_LayerNorm", "type": "sentence_transformers.models.LayerNorm"}],
            UnsupportedModel,
            "module 'LayerNorm'",
        ),
        ([{"path": "../up", "type": "sentence_transformers.models.Pooling"}], MalformedFile, "a path below it"),
        ([{"path": "/etc", "type": "sentence_transformers.models.Pooling"}], MalformedFile, "a path below it"),
        ([3], MalformedFile, "got 3"),
        ({}, MalformedFile, "holds dict instead of a list"),
    ],
)
def test_other_modules_are_refused(folder: Path, modules: Any, error: type[Exception], message: str):
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(error, match=message):
        open_checkpoint(folder)


def test_a_prompt_that_comes_before_every_text_is_refused(folder: Path):
    (folder / "config_sentence_transformers.json").write_text(
        '{"prompts": {"q": "query: "}, "default_prompt_name": null}'
    )
    open_checkpoint(folder)
    rewrite(folder / "config_sentence_transformers.json", default_prompt_name="q")
    with pytest.raises(UnsupportedModel, match="default_prompt_name = 'q'"):
        open_checkpoint(folder)


def test_positions_that_were_saved_as_integers_are_no_weights(folder: Path):
    """All-MiniLM-L6-v2 has them."""
    places = dict.fromkeys(read_safetensors(folder / "model.safetensors"), "model.safetensors")
    save_file({"embeddings.position_ids": np.arange(64)[None]}, folder / "positions.safetensors")
    places["embeddings.position_ids"] = "positions.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert open_checkpoint(folder).tensors.keys() == open_checkpoint(FILES["bert"]).tensors.keys()


def loaded_with(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> None:
    check_biases(checkpoint.spec, tensors)
    load_model(replace(checkpoint, tensors=tensors), RefBackend())


@pytest.mark.parametrize("name", [name for name in FILES if name != "roberta"])
def test_every_tensor_is_needed(name: str):
    checkpoint = open_checkpoint(FILES[name])
    for missing in checkpoint.tensors:
        fewer = {other: tensor for other, tensor in checkpoint.tensors.items() if other != missing}
        with pytest.raises(MalformedFile, match=re.escape(repr(missing))):
            loaded_with(checkpoint, fewer)


def test_a_table_of_positions_that_is_too_short(folder: Path):
    (folder / "sentence_bert_config.json").unlink()
    rewrite(folder / "config.json", max_position_embeddings=65)
    with pytest.raises(MalformedFile, match=r"position_embeddings.weight' has 64 rows; the model's config needs 65"):
        loaded(RefBackend(), folder)
