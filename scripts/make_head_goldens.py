"""Makes tests/models/heads: random heads that predict further tokens (MTP) for models of tests/models/goldens, with the
names that published checkpoints have, and the logits that transformers computes with them in float32. `rows` are those
of the whole prompt, `drafts` those of a draft, in which the head's own output takes the place of hidden states. Needs
what make_goldens.py does:

    python scripts/make_head_goldens.py [NAME ...]
"""

from __future__ import annotations

from zlib import crc32

import numpy as np
import torch
from make_goldens import FOLDER, chosen, filled, stored
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

HEADS = FOLDER.parent / "heads"
MODULES = ("qwen3next", "qwen35")  # models whose head is a module of its own
GOLDENS = ("deepseek_v3", "deepseek_v32", "glm4_moe", *MODULES)
OUTER = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"}
MODULE_NAMES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}
DRAFTED = 4  # tokens


def main() -> None:
    for name in chosen(GOLDENS):
        make(name)


def make(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDER / name, attn_implementation="eager", dtype=torch.float32)
    head = random_head(model, crc32(name.encode()) + 1, unit_gains="qwen" in name)
    with np.load(FOLDER / name / "expected.npz") as file:
        tokens = torch.tensor(file["tokens"].astype(np.int64))[None]
    with torch.no_grad():
        rows, drafted, drafts = logits(model, head, tokens)
    (HEADS / name).mkdir(parents=True, exist_ok=True)
    np.savez_compressed(HEADS / name / "expected.npz", tokens=tokens[0], rows=rows, drafted=drafted, drafts=drafts)
    save_file(published(model, head, name), HEADS / name / "head.safetensors")
    print(f"{name:18} {sum(file.stat().st_size for file in (HEADS / name).iterdir()):8} bytes")


def random_head(model: PreTrainedModel, seed: int, unit_gains: bool) -> MtpModel:
    """Returns a head for the model. `unit_gains`: its gains are less one."""
    torch.manual_seed(seed)
    model.config.num_mtp_layers = 1
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"]
    model.config.mtp_layer_types, model.config.mtp_mlp_layer_types = kinds[-1:], ["sparse"]
    head = MtpModel(model, 1)
    head.config.layer_types = ["full_attention"]  # MtpModel makes no other masks; indexed attention takes these
    filled(head.layers, stored(head.layers), lambda key, _: 1 if "norm" in key and not unit_gains else 0)
    return head


def logits(model: PreTrainedModel, head: MtpModel, tokens: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the logits of each row of a prompt, the tokens of a greedy draft that follows its last token, and the
    logits of each of them but the first."""
    answer = model(tokens, output_hidden_states=True)
    hidden = answer.hidden_states[-1]
    assert torch.allclose(model.lm_head(hidden), answer.logits, atol=1e-5), "these are not the states that it ends with"
    count = tokens.shape[1]
    cache = MtpCache(config=model.config.get_mtp_config())
    last = head.forward_layer(0, hidden[:, :-1], torch.arange(1, count)[None], cache, input_ids=tokens[:, 1:])
    rows = head._project_to_logits(last)[0]
    drafted, drafts = [rows[-1].argmax()], []
    for at in range(count, count + DRAFTED - 1):
        last = head.forward_layer(0, last[:, -1:], torch.tensor([[at]]), cache, input_ids=drafted[-1].view(1, 1))
        drafts.append(head._project_to_logits(last)[0, 0])
        drafted.append(drafts[-1].argmax())
    return rows.numpy(), torch.stack(drafted).numpy().astype(np.int32), torch.stack(drafts).numpy()


def published(model: PreTrainedModel, head: MtpModel, name: str) -> dict[str, torch.Tensor]:
    """Returns the head's tensors by the names that checkpoints have. Those of DeepSeek hold copies of the model's
    embeddings and output head."""
    layer = model.config.num_hidden_layers
    found = {}
    for key, tensor in head.layers[0].state_dict().items():
        for part, values in apart(key, tensor):
            found[part if name in MODULES else f"model.layers.{layer}.{part}"] = values.bfloat16().contiguous()
    if name in MODULES:
        stems = {key: key.rpartition(".")[0] for key in found}
        return {
            f"mtp.{MODULE_NAMES[stems[key]]}.weight" if stems[key] in MODULE_NAMES else f"mtp.layers.0.{key}": tensor
            for key, tensor in found.items()
        }
    if name == "deepseek_v3":
        found[f"model.layers.{layer}.embed_tokens.weight"] = model.get_input_embeddings().weight.bfloat16()
        found[f"model.layers.{layer}.shared_head.head.weight"] = model.lm_head.weight.bfloat16()
    return found


def apart(key: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Returns a tensor by its name within a layer; of experts, each matrix."""
    stem, _, suffix = key.rpartition(".")
    part = f"{OUTER[stem]}.{suffix}" if stem in OUTER else key.removeprefix("mtp_block.")
    if ".experts.gate_up_proj" in key:
        gates = [each.chunk(2) for each in tensor]
        return [
            (f"mlp.experts.{expert}.{kind}_proj.weight", values)
            for expert, pair in enumerate(gates)
            for kind, values in zip(("gate", "up"), pair, strict=True)
        ]
    if ".experts.down_proj" in key:
        return [(f"mlp.experts.{expert}.down_proj.weight", values) for expert, values in enumerate(tensor)]
    return [(part, tensor)]


if __name__ == "__main__":
    main()
