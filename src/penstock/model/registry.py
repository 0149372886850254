"""Finds a checkpoint's family by its architecture name. A new family is a file in families/ and a line in each table.

docs/families.md describes the contents of such a file. Other packages add families as entry points in
`penstock.families`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol, cast

from penstock.errors import UnsupportedModel
from penstock.model.config_reader import ConfigReader
from penstock.model.names import Naming
from penstock.model.ops import Ops, V
from penstock.model.packer import Packer
from penstock.model.spec import ModelSpec
from penstock.model.tensor import Tensor
from penstock.plugins import plugin

HUGGING_FACE = {  # architecture in config.json: family file
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MinistralForCausalLM": "llama",
    "Mistral3ForConditionalGeneration": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GraniteForCausalLM": "granite",
    "SmolLM3ForCausalLM": "smollm3",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma3nForCausalLM": "gemma3n",
    "Gemma3nForConditionalGeneration": "gemma3n",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "GPT2LMHeadModel": "gpt2",
    "Starcoder2ForCausalLM": "starcoder2",
    "GlmForCausalLM": "glm",
    "Glm4ForCausalLM": "glm4",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Glm4MoeForCausalLM": "glm4moe",
    "MiniMaxM2ForCausalLM": "minimaxm2",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "OlmoeForCausalLM": "olmoe",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeSharedForCausalLM": "granitemoe",
    "GraniteMoeHybridForCausalLM": "granitehybrid",
    "NemotronHForCausalLM": "nemotronh",
    "FalconH1ForCausalLM": "falconh1",
    "BambaForCausalLM": "bamba",
    "Ernie4_5ForCausalLM": "ernie45",
    "Ernie4_5_MoeForCausalLM": "ernie45",
    "Dots1ForCausalLM": "dots1",
    "HunYuanMoEV1ForCausalLM": "hunyuanmoe",
    "SolarOpenForCausalLM": "glm4moe",
    "Qwen2VLForConditionalGeneration": "qwen2",
    "Qwen2_5_VLForConditionalGeneration": "qwen2",
    "Qwen3VLForConditionalGeneration": "qwen3",
    "Qwen3VLMoeForConditionalGeneration": "qwen3vlmoe",
    "InternVLForConditionalGeneration": "internvl",
    "InternVLChatModel": "internvl",
    "Glm4MoeLiteForCausalLM": "deepseek2",
    "SeedOssForCausalLM": "seedoss",
    "GemmaForCausalLM": "gemma",
    "VaultGemmaForCausalLM": "vaultgemma",
    "CohereForCausalLM": "cohere",
    "Cohere2ForCausalLM": "cohere2",
    "StableLmForCausalLM": "stablelm",
    "Exaone4ForCausalLM": "exaone4",
    "Olmo3ForCausalLM": "olmo2",
    "CwmForCausalLM": "llama",
    "HunYuanDenseV1ForCausalLM": "hunyuan",
    "GPTNeoXForCausalLM": "gptneox",
    "PhiForCausalLM": "phi2",
    "FalconForCausalLM": "falcon",
    "MiniCPMForCausalLM": "minicpm",
    "OPTForCausalLM": "opt",
    "Llama4ForCausalLM": "llama4",
    "Llama4ForConditionalGeneration": "llama4",
    "BertModel": "bert",
    "BertForMaskedLM": "bert",
    "RobertaModel": "bert",
    "RobertaForMaskedLM": "bert",
    "XLMRobertaModel": "bert",
    "DistilBertModel": "distilbert",
    "DistilBertForMaskedLM": "distilbert",
    "MPNetModel": "mpnet",
    "MPNetForMaskedLM": "mpnet",
    "NomicBertModel": "nomic_bert",
    "ModernBertModel": "modernbert",
    "ModernBertForMaskedLM": "modernbert",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "DeepseekV32ForCausalLM": "deepseek32",
    "GlmMoeDsaForCausalLM": "glmdsa",
    "GptOssForCausalLM": "gptoss",
    "JambaForCausalLM": "jamba",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2",
    "Lfm2VlForConditionalGeneration": "lfm2",
    "Qwen3NextForCausalLM": "qwen3next",
    "KimiLinearForCausalLM": "kimi_linear",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5ForConditionalGeneration": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35",
    "Qwen3_5MoeForConditionalGeneration": "qwen35",
}
CLASSIFIERS = {  # architectures with a classification head: the one without it
    "BertForSequenceClassification": "BertModel",
    "RobertaForSequenceClassification": "RobertaModel",
    "XLMRobertaForSequenceClassification": "XLMRobertaModel",
    "ModernBertForSequenceClassification": "ModernBertModel",
    "GPT2ForSequenceClassification": "GPT2LMHeadModel",
    "Gemma3TextForSequenceClassification": "Gemma3ForCausalLM",
} | {name.replace("CausalLM", "SequenceClassification"): name for name in HUGGING_FACE if name.endswith("CausalLM")}
WITHOUT_HEAD = {  # embedding-only decoders: the one with an output head
    "GPT2Model": "GPT2LMHeadModel",
    "Gemma3TextModel": "Gemma3ForCausalLM",
} | {name.replace("ForCausalLM", "Model"): name for name in HUGGING_FACE if name.endswith("ForCausalLM")}
GGUF = {  # general.architecture of a GGUF file: family file
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "granite": "granite",
    "smollm3": "smollm3",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma3n": "gemma3n",
    "gemma4": "gemma4",
    "gemma-embedding": "gemma_embedding",
    "gpt2": "gpt2",
    "starcoder2": "starcoder2",
    "chatglm": "glm",
    "glm4": "glm4",
    "qwen3moe": "qwen3moe",
    "glm4moe": "glm4moe",
    "minimax-m2": "minimaxm2",
    "qwen2moe": "qwen2moe",
    "olmoe": "olmoe",
    "granitemoe": "granitemoe",
    "granitehybrid": "granitehybrid",
    "falcon-h1": "falconh1",
    "nemotron_h": "nemotronh",
    "nemotron_h_moe": "nemotronh",
    "qwen2vl": "qwen2",
    "qwen3vl": "qwen3",
    "qwen3vlmoe": "qwen3moe",
    "ernie4_5": "ernie45",
    "ernie4_5-moe": "ernie45",
    "dots1": "dots1",
    "seed_oss": "seedoss",
    "gemma": "gemma",
    "command-r": "cohere",
    "cohere2": "cohere2",
    "stablelm": "stablelm",
    "exaone4": "exaone4",
    "hunyuan-dense": "hunyuan",
    "hunyuan-moe": "hunyuanmoe",
    "gptneox": "gptneox",
    "phi2": "phi2",
    "falcon": "falcon",
    "minicpm": "minicpm",
    "llama4": "llama4",
    "bert": "bert",
    "nomic-bert": "nomic_bert",
    "modern-bert": "modernbert",
    "deepseek2": "deepseek2",
    "deepseek32": "deepseek32",
    "glm-dsa": "glmdsa",
    "gpt-oss": "gptoss",
    "jamba": "jamba",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2",
    "qwen3next": "qwen3next",
    "kimi-linear": "kimi_linear",
    "qwen35": "qwen35",
    "qwen35moe": "qwen35",
}
PLUGINS = "penstock.families"  # entry points: an architecture, or the `arch` of a ModelSpec, and the family's module
FAMILY_HAS = ("HUGGING_FACE", "GGUF", "read_hf", "read_gguf", "build")
NO_MODELS = {  # general.type of GGUF files that are not models
    "adapter": "a LoRA adapter, which changes a model's weights; give the model, and this file with --adapter",
    "imatrix": "an importance matrix, which llama.cpp quantizes with; give the model itself",
    "mmproj": "the image encoder (mmproj) of a multimodal model; give the file of its text model",
}


class PackedModel(Protocol):
    """Runs the forward pass of a model with packed weights."""

    def forward(self, ops: Ops[V]) -> V: ...


class FamilyModule(Protocol):
    """Describes a family's module."""

    HUGGING_FACE: Naming
    GGUF: Naming

    def read_hf(self, config: ConfigReader) -> ModelSpec: ...

    def read_gguf(self, config: ConfigReader, tensors: Mapping[str, Tensor]) -> ModelSpec:
        """Reads the spec from GGUF metadata; `tensors` are keyed by file name."""

    def build(self, spec: ModelSpec, pack: Packer) -> PackedModel: ...


def family(name: str) -> FamilyModule:
    if name not in {*HUGGING_FACE.values(), *GGUF.values()}:
        if (found := plugin(PLUGINS, name)) is not None:
            return cast(FamilyModule, found.load(has=FAMILY_HAS))
        raise UnsupportedModel(f"the family {name!r} is not supported; supported: {', '.join(HUGGING_FACE.values())}")
    return cast(FamilyModule, import_module(f"penstock.model.families.{name}"))


def family_of_hf(config: ConfigReader) -> FamilyModule:
    names = config.strings("architectures")
    if any("eagle3" in name.lower() for name in names):
        raise UnsupportedModel(
            f"{', '.join(names)} is a head that drafts for a model: give the model itself, and this with --draft"
        )
    if len(names) == 1 and names[0] not in HUGGING_FACE and plugin(PLUGINS, names[0]) is not None:
        return family(names[0])
    if len(names) != 1 or names[0] not in HUGGING_FACE:
        raise config.unsupported("architectures", names, HUGGING_FACE)
    return family(HUGGING_FACE[names[0]])


def family_of_gguf(metadata: ConfigReader) -> FamilyModule:
    kind = metadata.text("general.type", "model")
    if kind in NO_MODELS:
        raise UnsupportedModel(f"this GGUF file is {NO_MODELS[kind]}: general.type is {kind!r}")
    name = metadata.text("general.architecture")
    if name == "clip":
        raise UnsupportedModel(f"this GGUF file is {NO_MODELS['mmproj']}: general.architecture is 'clip'")
    if name not in GGUF and plugin(PLUGINS, name) is not None:
        return family(name)
    if name not in GGUF:
        raise metadata.unsupported("general.architecture", name, GGUF)
    return family(GGUF[name])
