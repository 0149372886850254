"""Makes tests/models/formats: tiny checkpoints in each quantized format of safetensors, the logits that transformers
computes in float32 from the values that they stand for, and a checksum of every weight's values.

Values are those of the format's own package where one can be had (compressed-tensors, mlx, bitsandbytes, torchao), and
else of the definition written here. Needs torch, transformers, safetensors and gguf, as make_goldens.py does, and these
four:

    python scripts/make_formats_goldens.py [NAME ...]
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import bitsandbytes.functional as bnb
import mlx.core as mx
import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from make_goldens import PLAIN, logits, random_model
from safetensors.torch import save_file
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

FOLDER = Path(__file__).parents[1] / "tests" / "models" / "formats"
PROMPT = 24
GROUP = 32
SIZES = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
    "rope_parameters": PLAIN,
}

Weight = torch.Tensor
Stored = dict[str, torch.Tensor]  # by what follows the module's name
Made = tuple[Stored, torch.Tensor]  # and the values that it stands for


# ---- whole numbers of a few bits ----


def groups_of(weight: Weight, size: int) -> torch.Tensor:
    return weight.unflatten(1, (-1, size))  # [rows, groups, size]


def rounded(weight: Weight, bits: int, group: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [rows, width], scales and zero points [rows, groups]."""
    parts, top = groups_of(weight, group), (1 << bits) - 1
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    if symmetric:
        scale = (parts.abs().amax(-1) / (top // 2)).half().float()
        zero = torch.full_like(scale, (top + 1) // 2)
    else:
        scale = ((high - low) / top).half().float()
        zero = (-low / scale).round().clamp(0, top)
    codes = (parts / scale[..., None] + zero[..., None]).round().clamp(0, top)
    return codes.flatten(1).long(), scale, zero.long()


def values(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return scale[:, place] * (codes - zero[:, place]).float()


def stream(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Each row's codes as one stream of bits, lowest first, in words: [rows, n] -> [rows, n * bits / 32]."""
    each = (codes.numpy()[..., None] >> np.arange(bits) & 1).astype(np.uint8).reshape(len(codes), -1)
    return torch.from_numpy(np.packbits(each, axis=1, bitorder="little").view(np.int32).copy())


def gptq(weight: Weight, bits: int, symmetric: bool = True, less: int = 1, ordered: bool = False) -> Made:
    width = weight.shape[1]
    place = torch.arange(width) // GROUP
    if ordered:
        order = torch.randperm(width)
        codes, scale, zero = rounded(weight[:, order], bits, GROUP, symmetric)
        back = order.argsort()
        codes, place = codes[:, back], place[back]
    else:
        codes, scale, zero = rounded(weight, bits, GROUP, symmetric)
    stored = {
        "qweight": stream(codes, bits).T,
        "qzeros": stream((zero - less & (1 << bits) - 1).T, bits),
        "scales": scale.T.half(),
        "g_idx": place.int(),
    }
    return stored, values(codes, scale, zero, place)


def awq(weight: Weight) -> Made:
    """Four bits of word w from bit 4 * i on: the output's column 8 * w + ORDER[i]."""
    codes, scale, zero = rounded(weight, 4, GROUP, symmetric=False)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(columns: torch.Tensor) -> torch.Tensor:
        return stream(columns.unflatten(1, (-1, 8))[..., order].flatten(1), 4)

    stored = {"qweight": words(codes.T), "qzeros": words(zero.T), "scales": scale.T.half()}
    return stored, values(codes, scale, zero, torch.arange(weight.shape[1]) // GROUP)


# ---- compressed-tensors ----


def compressed(weight: Weight, format: str, **args: Any) -> Made:
    """By the package's own compressor."""
    said = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=said)
    parts = groups_of(weight, said.group_size or weight.shape[1])
    top = (1 << said.num_bits - 1) - 1
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    state = {"weight": weight, "weight_zero_point": torch.zeros_like(low, dtype=torch.int8)}
    if said.type == "float":
        largest = parts.abs().amax(-1)
        if format.startswith("nv"):
            whole = 448 * 6 / weight.abs().max()
            state["weight_global_scale"] = whole.reshape(1)
            state["weight_scale"] = (largest / 6 * whole).to(torch.float8_e4m3fn).float()
        else:
            state["weight_scale"] = torch.exp2(torch.floor(torch.log2(largest)) - (8 if said.num_bits == 8 else 2))
    elif said.symmetric:
        state["weight_scale"] = (parts.abs().amax(-1) / top).bfloat16()
    else:
        scale = ((high - low) / (2 * top + 1)).bfloat16()
        state |= {"weight_scale": scale, "weight_zero_point": (-low / scale - top - 1).round().clamp(-top - 1, top)}
        state["weight_zero_point"] = state["weight_zero_point"].to(torch.int8)
    compressor = BaseCompressor.load_from_registry(format)
    stored = compressor.compress(state, scheme)
    if said.type == "float":
        return stored, values_of_floats(stored, compressor, scheme)
    wide = stored | {"weight_scale": stored["weight_scale"].float()}
    return stored, compressor.decompress(wide, scheme)["weight"].float()


def values_of_floats(stored: Stored, compressor: Any, scheme: QuantizationScheme) -> torch.Tensor:
    """The package's are bfloat16; the nearest to ours."""
    whole = stored.get("weight_global_scale")
    if "weight" in stored:
        exact = stored["weight"].float() * scales_of_floats(stored).repeat_interleave(32, 1)
    else:
        exact = fp4(stored["weight_packed"], scales_of_floats(stored), None if whole is None else 1 / whole)
    told = compressor.decompress(dict(stored), scheme)["weight"].float()
    assert torch.allclose(exact, told, rtol=2**-7, atol=0)
    return exact


def scales_of_floats(stored: Stored) -> torch.Tensor:
    scale = stored["weight_scale"]
    return torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()


def fp4(packed: torch.Tensor, scale: torch.Tensor, whole: torch.Tensor | None) -> torch.Tensor:
    positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.cat([positive, -positive])[torch.stack([packed & 15, packed >> 4], -1).long()].flatten(1)
    scaled = (groups_of(numbers, numbers.shape[1] // scale.shape[1]) * scale[..., None]).flatten(1)
    return scaled if whole is None else scaled * whole


def modelopt(weight: Weight) -> Made:
    whole = weight.abs().max() / (448 * 6)
    stored, _ = compressed(weight, "nvfp4-pack-quantized", **FP4, group_size=16, strategy="tensor_group")
    scale = (groups_of(weight, 16).abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    stored = {"weight": stored["weight_packed"], "weight_scale": scale, "weight_scale_2": whole}
    return stored | {"input_scale": torch.tensor(0.02)}, fp4(stored["weight"], scale.float(), whole)


# ---- other packages ----


def mlx(weight: Weight, bits: int) -> Made:
    parts = mx.quantize(mx.array(weight.numpy()).astype(mx.bfloat16), group_size=GROUP, bits=bits)
    wide = [part if part.dtype == mx.uint32 else part.astype(mx.float32) for part in parts]
    told = torch.from_numpy(np.array(mx.dequantize(*wide, group_size=GROUP, bits=bits)))
    codes, *factors = (torch.from_numpy(np.array(part).copy()) for part in wide)
    return {"weight": codes, "scales": factors[0].bfloat16(), "biases": factors[1].bfloat16()}, told


def mlx_floats(weight: Weight, mode: str, bits: int, group: int) -> Made:
    parts = mx.quantize(mx.array(weight.numpy()), group_size=group, bits=bits, mode=mode)
    told = mx.dequantize(*parts, group_size=group, bits=bits, mode=mode, dtype=mx.float32)
    codes, scales = (torch.from_numpy(np.array(part).copy()) for part in parts)
    return {"weight": codes, "scales": scales}, torch.from_numpy(np.array(told))


def torchao(weight: Weight, recipe: Any) -> Made:
    module = torch.nn.Linear(*weight.shape[::-1], bias=False)
    module.weight.data = weight.clone()
    quantize_(module, recipe)
    stored, _ = flatten_tensor_state_dict({"m.weight": module.weight})
    return {name.removeprefix("m."): tensor for name, tensor in stored.items()}, module.weight.dequantize().float()


def torchao_int4(weight: Weight) -> Made:
    """As its kernels for a GPU read it, which this machine need not have."""
    parts = groups_of(weight, GROUP)
    low, high = parts.amin(-1), parts.amax(-1)
    scale = ((high - low) / 15).bfloat16().float()
    zero = (low + 8 * scale).bfloat16().float()
    codes = ((parts - zero[..., None]) / scale[..., None]).round().clamp(-8, 7)
    numbers = codes.flatten(1).to(torch.int8)
    stored = {"_weight_qdata": numbers[:, ::2] & 15 | numbers[:, 1::2] << 4}
    stored |= {"_weight_scale": scale.T.bfloat16(), "_weight_zero_point": zero.T.bfloat16()}
    return stored, (scale[..., None] * codes + zero[..., None]).flatten(1)


def four_bits(weight: Weight, kind: str, nested: bool) -> Made:
    packed, state = bnb.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=nested)
    parts = {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    return {"weight": packed} | parts, bnb.dequantize_4bit(packed, state)


def eight_bits(weight: Weight) -> Made:
    largest = weight.abs().amax(1)
    codes = (weight / largest[:, None] * 127).round().to(torch.int8)
    stored = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return stored, codes.float() * (largest / 127)[:, None]


def exl3(name: str, rows: int, width: int) -> Made:
    """Any bits are numbers of a normal distribution. One after the other, as the format is described."""
    kind = {Q: "3inst", K: "mcg"}.get(name, "mul1")
    bits = 3 if name == K else 2
    ring = np.random.default_rng(crc32(name.encode())).integers(2, size=(width // 16, rows // 16, 256 * bits))
    numbers = np.empty((width, rows))
    for down, across in np.ndindex(ring.shape[:2]):
        for p in range(256):
            state = 0
            for bit in range((p + 1) * bits - 16, (p + 1) * bits):
                state = state << 1 | int(ring[down, across, bit % (256 * bits)])
            lane, own = divmod(p, 8)
            row, column = lane % 4 * 2 + own % 2 + own % 4 // 2 * 8, lane // 4 + own // 4 * 8
            numbers[16 * down + row, 16 * across + column] = exl3_number(state, kind)
    turn = np.array([[(-1) ** (i & j).bit_count() for j in range(128)] for i in range(128)]) / 128**0.5
    blocks = numbers.reshape(width // 128, 128, rows // 128, 128)
    turned = np.einsum("ij,ajbk,kl->aibl", turn, blocks, turn).reshape(width, rows)
    suh, svh = (torch.randn(size).sign() * (1 + torch.rand(size)) for size in (width, rows))
    suh, svh = (suh * 0.1).half(), svh.half()
    words = np.packbits(ring.astype(np.uint8), axis=2).view(">u4").astype("<u4").view(np.int16)
    stored = {"trellis": torch.from_numpy(words), "suh": suh, "svh": svh}
    if kind != "3inst":
        stored[kind] = torch.tensor(EXL3_FACTORS[kind], dtype=torch.uint32).view(torch.int)
    told = svh.double()[:, None] * torch.from_numpy(turned.T.copy()) * suh.double()
    return stored, told.float()


def exl3_number(state: int, kind: str) -> float:
    product = state * EXL3_FACTORS[kind] + (64248484 if kind == "3inst" else 0) & 0xFFFFFFFF
    if kind == "mul1":
        step, middle = (float(np.array(bits, np.uint16).view(np.float16)) for bits in (0x1EEE, 0xC931))
        return float(np.float16((1024 + sum(product.to_bytes(4, "little"))) * step + middle))
    product = product & 0x8FFF8FFF ^ 0x3B603B60
    low, high = (np.array(half, np.uint16).view(np.float16) for half in (product & 0xFFFF, product >> 16))
    return float(np.float16(low + high))


# ---- what there is ----

EXL3_FACTORS = {"3inst": 89226354, "mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}

FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
FP4 = {"num_bits": 4, "type": "float", "symmetric": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "damp_percent": 0.01, "sym": True, "desc_act": False}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": True, "data_type": "int", "iters": 200}


def compressed_config(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def of_compressed(format: str, **weights: Any) -> tuple[dict[str, Any], Callable[[str, Weight], Made]]:
    return compressed_config(format, **weights), lambda name, weight: compressed(weight, format, **weights)


INT = {"type": "int", "strategy": "group", "group_size": GROUP}
BYTES, FOUR_BITS = Int8WeightOnlyConfig(), IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP))
Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
FORMATS: dict[str, tuple[dict[str, Any], Callable[[str, Weight], Made | None]]] = {
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
        lambda name, weight: awq(weight),
    ),
    "gptq": (GPTQ, lambda name, weight: gptq(weight, 4)),
    "gptq-ordered": (
        GPTQ | {"sym": False, "desc_act": True, "checkpoint_format": "gptq_v2"},
        lambda name, weight: gptq(weight, 4, symmetric=False, less=0, ordered=True),
    ),
    "gptq-3-8": (
        GPTQ | {"bits": 3, "sym": False, "dynamic": {"+:.*q_proj": {"bits": 8}}},
        lambda name, weight: gptq(weight, 8 if name == Q else 3, symmetric=name == Q),
    ),
    "autoround-gptq": (
        ROUND | {"packing_format": "auto_round:auto_gptq", "extra_config": {Q: {"bits": 8}, K: {"bits": 16}}},
        lambda name, weight: None if name == K else without(gptq(weight, 8 if name == Q else 4), "g_idx"),
    ),
    "autoround-awq": (
        ROUND | {"sym": False, "packing_format": "auto_round:auto_awq", "extra_config": {".*k_proj": {"bits": 16}}},
        lambda name, weight: None if name == K else awq(weight),
    ),
    "int4": of_compressed("pack-quantized", num_bits=4, symmetric=True, **INT),
    "int4-zeros": of_compressed("pack-quantized", num_bits=4, symmetric=False, **INT),
    "int8-packed": of_compressed("pack-quantized", num_bits=8, symmetric=True, type="int", strategy="channel"),
    "int8": of_compressed("int-quantized", num_bits=8, symmetric=True, type="int", strategy="channel"),
    "mxfp4": of_compressed("mxfp4-pack-quantized", **FP4, strategy="group", group_size=32),
    "mxfp8": of_compressed("mxfp8-quantized", **FP8, strategy="group", group_size=32),
    "w4afp8": of_compressed("int-quantized", num_bits=4, symmetric=True, **INT),
    "nvfp4": of_compressed("nvfp4-pack-quantized", **FP4, strategy="tensor_group", group_size=16),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"}},
        lambda name, weight: modelopt(weight),
    ),
    "mlx": (
        {"group_size": GROUP, "bits": 4, Q: {"group_size": GROUP, "bits": 8}, K: False},
        lambda name, weight: None if name == K else mlx(weight, 8 if name == Q else 4),
    ),
    "mlx-3-6": (
        {"group_size": GROUP, "bits": 3, "mode": "affine", Q: {"group_size": GROUP, "bits": 6}},
        lambda name, weight: mlx(weight, 6 if name == Q else 3),
    ),
    "mlx-floats": (
        {"group_size": 32, "bits": 4, "mode": "mxfp4"}
        | {Q: {"group_size": 32, "bits": 8, "mode": "mxfp8"}, K: {"group_size": 16, "bits": 4, "mode": "nvfp4"}},
        lambda name, weight: mlx_floats(
            weight, *{Q: ("mxfp8", 8, 32), K: ("nvfp4", 4, 16)}.get(name, ("mxfp4", 4, 32))
        ),
    ),
    "torchao": (
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}},
        lambda name, weight: torchao(weight, {Q: Float8WeightOnlyConfig(), K: FOUR_BITS}.get(name, BYTES)),
    ),
    "torchao-int4": (
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {}}}},
        lambda name, weight: torchao_int4(weight),
    ),
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        lambda name, weight: four_bits(weight, "nf4", nested=True),
    ),
    "fp4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        lambda name, weight: four_bits(weight, "fp4", nested=False),
    ),
    "bytes": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False},
        lambda name, weight: eight_bits(weight),
    ),
    "exl3": (
        {"quant_method": "exl3", "version": "0.0.6", "bits": 2.1, "head_bits": 6, "out_scales": "always"},
        lambda name, weight: exl3(name, *weight.shape),
    ),
}
WIDER = {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 4}  # EXL3 turns 128 at a time
MLX = ("mlx", "mlx-3-6", "mlx-floats")  # quantize embeddings too


def without(made: Made, part: str) -> Made:
    stored, told = made
    return {name: tensor for name, tensor in stored.items() if name != part}, told


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or FORMATS:
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        write(name)
        print(f"{name:16} {sum(file.stat().st_size for file in (FOLDER / name).iterdir()):8} bytes")


def write(name: str) -> None:
    seed = crc32(name.encode())
    said, make = FORMATS[name]
    model = random_model("bias" if name == "gptq" else "tied", seed, **SIZES | (WIDER if name == "exl3" else {}))
    stored: Stored = {}
    checksums: dict[str, int] = {}
    rows: dict[str, np.ndarray] = {}
    endings = ("_proj.weight", "embed_tokens.weight") if name in MLX else ("_proj.weight",)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            module = key.removesuffix(".weight")
            made = make(module, weight.detach().clone()) if key.endswith(endings) else None
            if made is None:
                stored[key] = weight.bfloat16()
                continue
            weight.copy_(made[1])
            stored |= {f"{module}.{part}": tensor for part, tensor in made[0].items()}
            if name == "exl3":  # sums: to the bit, they depend on their order
                rows[key] = made[1][[0, 77]].numpy()
            else:
                checksums[key] = checksum(made[1].numpy())
    tokens = np.random.default_rng(seed).integers(model.config.vocab_size, size=PROMPT)
    folder = FOLDER / name
    folder.mkdir()
    save_file({key: tensor.contiguous() for key, tensor in stored.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(model, name, said), indent=1))
    expected: dict[str, Any] = {"tokens": tokens.astype(np.int32), "logits": logits(model, tokens)}
    expected |= {"names": list(checksums), "checksums": list(checksums.values())}
    np.savez_compressed(folder / "expected.npz", **expected, **rows)


def config_of(model: Any, name: str, said: dict[str, Any]) -> dict[str, Any]:
    config = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}
    return config | ({"quantization": said} if name in MLX else {"quantization_config": said})


def checksum(found: np.ndarray) -> int:
    return crc32((found + np.float32(0)).tobytes())  # one zero, not two


if __name__ == "__main__":
    main()
