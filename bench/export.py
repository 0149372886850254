"""Lets llama.cpp judge the GGUF files that `penstock quantize` writes, for every family and for odd configurations.

    pip install xllamacpp                    # in any environment: --python names its interpreter
    python bench/export.py --python other/bin/python

Each golden of the tests, odd ones included, is written as F32 and read by llama.cpp. It must predict a sequence of
tokens as Penstock does from the folder: perplexities equal to 1e-3. A configuration that GGUF cannot express must be
refused. To be run before a release; it exits with 1 if a file is read differently, or not at all.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "tests" / "models"
GOLDENS, FOLDERS, ODD_GOLDENS = MODELS / "goldens", MODELS / "folders", MODELS / "odd"
TOLERANCE = 1e-3  # of perplexities, relative
CONTEXT = 48
DIMS = 12  # of a head of the goldens, at most
PATIENCE = 120  # seconds for one file
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED = ("granite", "granitemoe", "minicpm", "qwen2", "qwen3", "smollm3")
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": [8.0] * 4,
    "short_factor": [1.0, 1.2, 1.5, 3],
}
LONGROPE["original_max_position_embeddings"] = 256
BIASED = {"attention_bias": True, "mlp_bias": True}
EACH_KV = {"num_key_value_heads": 4}
LITE = {"num_hidden_layers": 27, "topk_method": "greedy"}
ODD: dict[str, tuple[str, dict[str, Any]]] = {  # name: the golden that it is made of, and what its config says instead
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "mistral, window as long as the context": ("mistral", {"sliding_window": 64}),
    "mixtral with a window": ("mixtral", {"sliding_window": 9}),
    "phi3 without a window": ("phi3", {"sliding_window": None}),
    "phi3, longrope": ("longrope", {"original_max_position_embeddings": 256, "rope_parameters": LONGROPE}),
    "starcoder2 without a window": ("starcoder2", {"sliding_window": None}),
    "qwen3_moe, weights not renormalized": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_moe, weights renormalized": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3next, weights not renormalized": ("qwen3next", {"norm_topk_prob": False}),
    "qwen2_moe, weights renormalized": ("qwen2_moe", {"norm_topk_prob": True}),
    "olmoe, weights renormalized": ("olmoe", {"norm_topk_prob": True}),
    "olmoe, each head with its KV": ("olmoe", EACH_KV),
    "dots1, each head with its KV": ("dots1", EACH_KV),
    "dots1, weights not renormalized": ("dots1", EACH_KV | {"norm_topk_prob": False}),
    "ernie4_5_moe, experts in all layers but one": ("ernie4_5_moe", {"num_hidden_layers": 2, "moe_layer_interval": 1}),
    "gpt_neox, the other GELU": ("gpt_neox", {"hidden_act": "gelu_new"}),
    "falcon, the other GELU": ("falcon", {"activation": "gelu_new"}),
    "glm4_moe, weights not renormalized": ("glm4_moe", {"norm_topk_prob": False}),
    "deepseek_v3, weights not renormalized": ("deepseek_v3", {"norm_topk_prob": False}),
    "deepseek_v3, one group": ("deepseek_v3", {"n_group": 1}),
    **{f"{name}, llama3's RoPE": (name, {"rope_parameters": LLAMA3}) for name in SCALED},
    "llama, rope base 500000": ("tied", {"rope_parameters": {"rope_theta": 500000.0}}),
    "qwen2, yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3, yarn": ("qwen3", {"rope_parameters": YARN}),
    "qwen3_moe, yarn": ("qwen3_moe", {"rope_parameters": YARN}),
    "llama, yarn with a factor of its own": ("yarn", {"rope_parameters": {**YARN, "attention_factor": 1.7}}),
    "gemma2, window in no layer": ("gemma2", {"layer_types": ["full_attention"] * 3}),
    "gemma2, scores divided": ("gemma2", {"query_pre_attn_scalar": 99}),
    "gemma2, logits not capped": ("gemma2", {"final_logit_softcapping": None}),
    "gemma3, logits capped": ("gemma3", {"final_logit_softcapping": 3.0}),
    "granite, scores multiplied": ("granite", {"attention_multiplier": 0.3}),
    **{
        f"{golden}, biases": (golden, BIASED)
        for golden in ("qwen3", "qwen3_moe", "smollm3", "granite", "tied", "gemma2", "gemma3")
    },
    "exaone4 without a window": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "olmo3 without a window": ("olmo3", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "cohere2, windows elsewhere": ("cohere2", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
    "cohere_plus, 64 layers": ("cohere_plus", {"num_hidden_layers": 64}),
    "deepseek_v2, lite": ("deepseek_v2", LITE),
    "deepseek_v2, lite with groups of experts": ("deepseek_v2", LITE | {"topk_method": "group_limited_greedy"}),
}


class Verdict(NamedTuple):
    """Says what became of a configuration."""

    name: str
    ours: float  # perplexity; 0: it was refused
    theirs: float  # 0: llama.cpp did not read the file
    remark: str

    @property
    def good(self) -> bool:
        return not self.ours or abs(self.theirs / self.ours - 1) < TOLERANCE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="interpreter that has xllamacpp")
    parser.add_argument("names", nargs="*", help="configurations; without any, all")
    parser.add_argument("--judge", nargs=3, metavar=("FILE", "TOKENS", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.judge:
        Path(args.judge[2]).write_text(json.dumps(predictions(args.judge[0], json.loads(args.judge[1]))))
        return
    verdicts = []
    for name, golden, changes in configurations():
        if not args.names or name in args.names:
            verdicts.append(judged(name, golden, changes, args.python))
            print(line(verdicts[-1]), flush=True)
    wrong = [verdict.name for verdict in verdicts if not verdict.good]
    print(f"{len(verdicts)} configurations, read differently: {', '.join(wrong) or 'none'}")
    raise SystemExit(bool(wrong))


def configurations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for place in (GOLDENS, FOLDERS, ODD_GOLDENS):
        yield from ((folder.name, str(folder), {}) for folder in sorted(place.iterdir()) if is_decoder(folder))
    yield from ((name, golden, changes) for name, (golden, changes) in ODD.items())


def is_decoder(golden: Path) -> bool:
    import numpy as np

    kept = set(np.load(golden / "expected.npz"))
    return "embedding" not in kept and ("weights" not in kept or "steps" in kept)


def line(verdict: Verdict) -> str:
    mark = "ok   " if verdict.good else "WRONG"
    return f"{mark} {verdict.name:<40}{verdict.ours:>12.4f}{verdict.theirs:>12.4f}  {verdict.remark}"


def judged(name: str, golden: str, changes: dict[str, Any], python: str) -> Verdict:
    """Writes a configuration as GGUF and compares what the folder and the file predict."""
    import numpy as np

    from penstock.errors import PenstockError
    from penstock.planning.evaluation import log_softmax

    with tempfile.TemporaryDirectory() as place:
        folder, file = Path(place) / "folder", Path(place) / "model.gguf"
        tokens = make_folder(folder, golden, changes)
        try:
            write_file(folder, file)
        except PenstockError as error:
            return Verdict(name, 0, 0, f"refused: {error}")
        ours = log_softmax(logits_of(folder, tokens))
        answer = Path(place) / "answer.json"
        judge = [python, __file__, "--judge", str(file), json.dumps(tokens), str(answer)]
        done = subprocess.run(judge, capture_output=True, text=True, timeout=PATIENCE, check=False)
        targets = tokens[CONTEXT // 2 + 1 :]
        before = float(np.exp(-ours[np.arange(len(targets)), targets].mean()))
        if done.returncode:
            return Verdict(name, before, 0, f"llama.cpp did not read it: {reason(done.stdout + done.stderr)}")
        theirs = np.array(json.loads(answer.read_text()))
        after = float(np.exp(-theirs[np.arange(len(targets)), targets].mean()))
        return Verdict(name, before, after, f"log-probabilities differ by at most {np.abs(ours - theirs).max():.1e}")


def reason(said: str) -> str:
    """Returns the lines of llama.cpp's log that tell why it failed."""
    lines = [line for line in said.splitlines() if "error" in line.lower() or "assert" in line.lower()]
    return " | ".join(lines[:3])[:400]


def make_folder(folder: Path, golden: str, changes: dict[str, Any]) -> list[int]:
    """Copies a golden with a tokenizer and a changed config; returns the tokens to predict."""
    import numpy as np

    shutil.copytree(GOLDENS / golden, folder)
    expected = np.load(folder / "expected.npz")
    if "weights" in expected:
        write_odd_weights(folder, json.loads(expected["weights"].item()))
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    if changes == BIASED:
        edit_tensors(folder / "model.safetensors", biased)
    if "num_hidden_layers" in changes:
        edit_tensors(folder / "model.safetensors", partial(repeated, changes["num_hidden_layers"]))
    if "num_key_value_heads" in changes:
        edit_tensors(folder / "model.safetensors", doubled)
    write_tokenizer(folder / "tokenizer.json", config["vocab_size"])
    tokens: list[int] = expected["tokens"][:CONTEXT].tolist()
    return tokens


def write_odd_weights(folder: Path, shapes: dict[str, list[int]]) -> None:
    """Writes the weights of an odd golden, as its test does."""
    from safetensors.numpy import save_file

    sys.path.insert(0, str(ROOT))
    from tests.models.odd_weights import random_weights

    config = json.loads((folder / "config.json").read_text())
    save_file(random_weights(config, shapes), folder / "model.safetensors")


def edit_tensors(file: Path, edit: Callable[[str, Any], Iterator[tuple[str, Any]]]) -> None:
    """Writes the file again with the tensors that `edit` makes of each, as arrays of words or of float32."""
    import numpy as np

    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    stored = json.loads(data[8:start])
    stored.pop("__metadata__", None)
    header, values = {}, b""
    for name, tensor in stored.items():
        first, last = tensor["data_offsets"]
        words = np.frombuffer(data[start + first : start + last], "<u2").reshape(*tensor["shape"], -1)
        for made, array in edit(name, words):
            floats = array.dtype == np.float32
            shape = list(array.shape if floats else array.shape[:-1])
            place = [len(values), len(values) + array.nbytes]
            header[made] = {"dtype": "F32" if floats else tensor["dtype"], "shape": shape, "data_offsets": place}
            values += array.tobytes()
    text = json.dumps(header).encode()
    file.unlink()
    file.write_bytes(len(text).to_bytes(8, "little") + text + values)


def biased(name: str, words: Any) -> Iterator[tuple[str, Any]]:
    """Yields a tensor, and a bias if it is a product of attention or of an MLP."""
    import numpy as np

    yield name, words
    if name.endswith("_proj.weight"):
        noise = np.random.default_rng(len(name)).standard_normal(len(words))
        yield name.removesuffix("weight") + "bias", (0.3 * noise).astype(np.float32)


def repeated(layers: int, name: str, words: Any) -> Iterator[tuple[str, Any]]:
    """Yields a tensor, and those of the second layer for all layers after it."""
    if ".layers." not in name or ".layers.0." in name:
        yield name, words
    for layer in range(1, layers) if ".layers.1." in name else ():
        yield name.replace(".layers.1.", f".layers.{layer}."), words


def doubled(name: str, words: Any) -> Iterator[tuple[str, Any]]:
    """Yields a tensor, with each KV head twice where it is one of keys or values."""
    import numpy as np

    parts = (".k_proj.", ".v_proj.", *((".k_norm.",) if words.shape[0] > DIMS else ()))
    yield name, np.concatenate([words, words]) if any(part in name for part in parts) else words


def write_tokenizer(path: Path, size: int) -> None:
    """Writes a byte-level tokenizer with so many tokens."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: size - 1]
    vocab = {token: id for id, token in enumerate([*letters, letters[0] + letters[1]])}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[(letters[0], letters[1])]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.save(str(path))


def write_file(folder: Path, file: Path) -> None:
    from penstock.backend.cpu.quantize import quantize
    from penstock.model.gguf.export import export
    from penstock.model.gguf.writer import write_gguf

    made = export(folder, "f32", lambda tensor, format: quantize(tensor, format, threads=1))
    write_gguf(file, made.keys, made.tensors, lambda name, size: None)


def logits_of(folder: Path, tokens: list[int]) -> Any:
    """Returns the logits of the second half of the tokens, from the reference backend. Its context is as long as
    llama.cpp's, because both choose longrope's factors by it."""
    import numpy as np

    from penstock.config import Config
    from penstock.planning.evaluation import Scorer

    scorer = Scorer(Config(model=str(folder), device="ref", max_len=2 * CONTEXT), CONTEXT)
    found = scorer.logits([np.array(tokens, np.int32)])
    scorer.close()
    return found


def predictions(file: str, tokens: list[int]) -> list[list[float]]:
    """Returns llama.cpp's log-probabilities of all tokens at each position of the second half."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = file
    parameters.n_ctx = 2 * CONTEXT
    parameters.n_parallel = 1
    parameters.port = 0
    parameters.warmup = False
    parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    parameters.cpuparams.n_threads = 1
    server = xllamacpp.Server(parameters)
    return [ask(server, tokens[: at + 1]) for at in range(CONTEXT // 2, len(tokens) - 1)]


def ask(server: Any, prompt: list[int]) -> list[float]:
    body = {"prompt": prompt, "n_predict": 1, "n_probs": 64, "cache_prompt": False, "temperature": 0.0}
    request = urllib.request.Request(f"{server.listening_address}/completion", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        return by_token(json.load(response))


def by_token(answer: Any) -> list[float]:
    tops = answer["completion_probabilities"][0]["top_logprobs"]
    return [score for _, score in sorted((top["id"], top["logprob"]) for top in tops)]


if __name__ == "__main__":
    main()
