"""Lists common open models under Ollama's names: `llama3.2`, `llama3.2:1b`, `llama3.2:1b-q8_0`.

Each is a Hugging Face repository of GGUF files. The list was written from memory: the hub is authoritative, and errors
list a repository's actual files. Sizes are computed from the number of parameters. All models follow instructions,
except embedding models.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from penstock.store.quantizations import choose, quantization, size_about

FEW = ("Q4_K_M", "Q8_0")
COMMON = ("Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0")
WIDE = ("Q2_K", "Q3_K_M", *COMMON)
EIGHT = ("Q8_0",)
MXFP4 = ("MXFP4",)
SUFFIXES = ("-instruct", "-it", "-chat")  # optional in tags, before the quantization


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """Describes a named model: its repository and size."""

    name: str
    tag: str
    repo: str
    arch: str  # general.architecture of its GGUF files
    parameters: float  # in billions
    quantizations: tuple[str, ...]

    @property
    def full_name(self) -> str:
        return f"{self.name}:{self.tag}"

    @property
    def sizes(self) -> dict[str, int]:
        return {each: size_about(self.parameters, each) for each in self.quantizations}

    def default(self, memory: int) -> str:
        """Returns the default quantization: one that fits in memory, else the smallest."""
        return choose(self.sizes, memory) or min(self.quantizations, key=lambda each: self.sizes[each])


_ROWS: tuple[tuple[str, str, str, str, float, tuple[str, ...]], ...] = (  # the first row of a name is its default
    ("llama3.2", "3b", "bartowski/Llama-3.2-3B-Instruct-GGUF", "llama", 3.21, COMMON),
    ("llama3.2", "1b", "bartowski/Llama-3.2-1B-Instruct-GGUF", "llama", 1.24, COMMON),
    ("llama3.1", "8b", "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF", "llama", 8.03, WIDE),
    ("llama3.1", "70b", "bartowski/Meta-Llama-3.1-70B-Instruct-GGUF", "llama", 70.6, WIDE),
    ("llama3.3", "70b", "bartowski/Llama-3.3-70B-Instruct-GGUF", "llama", 70.6, WIDE),
    ("qwen3", "8b", "Qwen/Qwen3-8B-GGUF", "qwen3", 8.19, COMMON),
    ("qwen3", "0.6b", "unsloth/Qwen3-0.6B-GGUF", "qwen3", 0.6, WIDE),
    ("qwen3", "1.7b", "unsloth/Qwen3-1.7B-GGUF", "qwen3", 1.72, WIDE),
    ("qwen3", "4b", "Qwen/Qwen3-4B-GGUF", "qwen3", 4.02, COMMON),
    ("qwen3", "14b", "Qwen/Qwen3-14B-GGUF", "qwen3", 14.8, COMMON),
    ("qwen3", "32b", "Qwen/Qwen3-32B-GGUF", "qwen3", 32.8, COMMON),
    ("qwen3", "30b-a3b", "Qwen/Qwen3-30B-A3B-GGUF", "qwen3moe", 30.5, COMMON),
    ("qwen3-coder", "30b", "unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF", "qwen3moe", 30.5, WIDE),
    ("qwen3-next", "80b", "unsloth/Qwen3-Next-80B-A3B-Instruct-GGUF", "qwen3next", 79.7, WIDE),
    ("qwen2.5", "7b", "bartowski/Qwen2.5-7B-Instruct-GGUF", "qwen2", 7.62, WIDE),
    ("qwen2.5", "0.5b", "bartowski/Qwen2.5-0.5B-Instruct-GGUF", "qwen2", 0.49, COMMON),
    ("qwen2.5", "1.5b", "bartowski/Qwen2.5-1.5B-Instruct-GGUF", "qwen2", 1.54, COMMON),
    ("qwen2.5", "3b", "bartowski/Qwen2.5-3B-Instruct-GGUF", "qwen2", 3.09, COMMON),
    ("qwen2.5", "14b", "bartowski/Qwen2.5-14B-Instruct-GGUF", "qwen2", 14.8, WIDE),
    ("qwen2.5", "32b", "bartowski/Qwen2.5-32B-Instruct-GGUF", "qwen2", 32.8, WIDE),
    ("qwen2.5", "72b", "bartowski/Qwen2.5-72B-Instruct-GGUF", "qwen2", 72.7, WIDE),
    ("qwen2.5-coder", "7b", "bartowski/Qwen2.5-Coder-7B-Instruct-GGUF", "qwen2", 7.62, WIDE),
    ("qwen2.5-coder", "0.5b", "bartowski/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2", 0.49, COMMON),
    ("qwen2.5-coder", "1.5b", "bartowski/Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2", 1.54, COMMON),
    ("qwen2.5-coder", "3b", "bartowski/Qwen2.5-Coder-3B-Instruct-GGUF", "qwen2", 3.09, COMMON),
    ("qwen2.5-coder", "14b", "bartowski/Qwen2.5-Coder-14B-Instruct-GGUF", "qwen2", 14.8, WIDE),
    ("qwen2.5-coder", "32b", "bartowski/Qwen2.5-Coder-32B-Instruct-GGUF", "qwen2", 32.8, WIDE),
    ("qwq", "32b", "Qwen/QwQ-32B-GGUF", "qwen2", 32.8, COMMON),
    ("gemma3", "4b", "ggml-org/gemma-3-4b-it-GGUF", "gemma3", 3.88, FEW),
    ("gemma3", "270m", "unsloth/gemma-3-270m-it-GGUF", "gemma3", 0.27, COMMON),
    ("gemma3", "1b", "ggml-org/gemma-3-1b-it-GGUF", "gemma3", 1.0, FEW),
    ("gemma3", "12b", "ggml-org/gemma-3-12b-it-GGUF", "gemma3", 11.8, FEW),
    ("gemma3", "27b", "ggml-org/gemma-3-27b-it-GGUF", "gemma3", 27.0, FEW),
    ("gemma2", "9b", "bartowski/gemma-2-9b-it-GGUF", "gemma2", 9.24, WIDE),
    ("gemma2", "2b", "bartowski/gemma-2-2b-it-GGUF", "gemma2", 2.61, COMMON),
    ("gemma2", "27b", "bartowski/gemma-2-27b-it-GGUF", "gemma2", 27.2, WIDE),
    ("mistral", "7b", "bartowski/Mistral-7B-Instruct-v0.3-GGUF", "llama", 7.25, WIDE),
    ("mistral-nemo", "12b", "bartowski/Mistral-Nemo-Instruct-2407-GGUF", "llama", 12.2, WIDE),
    ("mistral-small", "24b", "bartowski/Mistral-Small-24B-Instruct-2501-GGUF", "llama", 23.6, WIDE),
    ("phi4", "14b", "bartowski/phi-4-GGUF", "phi3", 14.7, WIDE),
    ("phi4-mini", "3.8b", "bartowski/microsoft_Phi-4-mini-instruct-GGUF", "phi3", 3.84, COMMON),
    ("phi3.5", "3.8b", "bartowski/Phi-3.5-mini-instruct-GGUF", "phi3", 3.82, COMMON),
    ("deepseek-r1", "8b", "bartowski/DeepSeek-R1-Distill-Llama-8B-GGUF", "llama", 8.03, WIDE),
    ("deepseek-r1", "1.5b", "bartowski/DeepSeek-R1-Distill-Qwen-1.5B-GGUF", "qwen2", 1.78, COMMON),
    ("deepseek-r1", "7b", "bartowski/DeepSeek-R1-Distill-Qwen-7B-GGUF", "qwen2", 7.62, WIDE),
    ("deepseek-r1", "14b", "bartowski/DeepSeek-R1-Distill-Qwen-14B-GGUF", "qwen2", 14.8, WIDE),
    ("deepseek-r1", "32b", "bartowski/DeepSeek-R1-Distill-Qwen-32B-GGUF", "qwen2", 32.8, WIDE),
    ("deepseek-r1", "70b", "bartowski/DeepSeek-R1-Distill-Llama-70B-GGUF", "llama", 70.6, WIDE),
    ("gpt-oss", "20b", "ggml-org/gpt-oss-20b-GGUF", "gpt-oss", 20.9, MXFP4),
    ("gpt-oss", "120b", "ggml-org/gpt-oss-120b-GGUF", "gpt-oss", 116.8, MXFP4),
    ("smollm2", "1.7b", "bartowski/SmolLM2-1.7B-Instruct-GGUF", "llama", 1.71, COMMON),
    ("smollm2", "135m", "bartowski/SmolLM2-135M-Instruct-GGUF", "llama", 0.135, COMMON),
    ("smollm2", "360m", "bartowski/SmolLM2-360M-Instruct-GGUF", "llama", 0.362, COMMON),
    ("smollm3", "3b", "ggml-org/SmolLM3-3B-GGUF", "smollm3", 3.08, FEW),
    ("granite4", "micro-h", "ibm-granite/granite-4.0-h-micro-GGUF", "granitehybrid", 3.19, COMMON),
    ("granite4", "tiny-h", "ibm-granite/granite-4.0-h-tiny-GGUF", "granitehybrid", 6.94, COMMON),
    ("granite4", "small-h", "ibm-granite/granite-4.0-h-small-GGUF", "granitehybrid", 32.2, COMMON),
    ("granite3.3", "8b", "ibm-granite/granite-3.3-8b-instruct-GGUF", "granite", 8.17, COMMON),
    ("granite3.3", "2b", "ibm-granite/granite-3.3-2b-instruct-GGUF", "granite", 2.53, COMMON),
    ("olmo2", "7b", "allenai/OLMo-2-1124-7B-Instruct-GGUF", "olmo2", 7.3, COMMON),
    ("olmo2", "1b", "allenai/OLMo-2-0425-1B-Instruct-GGUF", "olmo2", 1.48, COMMON),
    ("olmo2", "13b", "allenai/OLMo-2-1124-13B-Instruct-GGUF", "olmo2", 13.7, COMMON),
    ("lfm2", "1.2b", "LiquidAI/LFM2-1.2B-GGUF", "lfm2", 1.17, COMMON),
    ("lfm2", "350m", "LiquidAI/LFM2-350M-GGUF", "lfm2", 0.354, COMMON),
    ("lfm2", "700m", "LiquidAI/LFM2-700M-GGUF", "lfm2", 0.742, COMMON),
    ("glm4", "9b", "bartowski/THUDM_GLM-4-9B-0414-GGUF", "glm4", 9.4, WIDE),
    ("glm4", "32b", "bartowski/THUDM_GLM-4-32B-0414-GGUF", "glm4", 32.6, WIDE),
    ("glm-4.5-air", "106b", "unsloth/GLM-4.5-Air-GGUF", "glm4moe", 110, WIDE),
    ("command-r", "32b", "bartowski/c4ai-command-r-08-2024-GGUF", "command-r", 32.3, WIDE),
    ("command-r7b", "7b", "bartowski/c4ai-command-r7b-12-2024-GGUF", "cohere2", 8.03, WIDE),
    ("seed-oss", "36b", "unsloth/Seed-OSS-36B-Instruct-GGUF", "seed_oss", 36.2, WIDE),
    ("tinyllama", "1.1b", "TheBloke/TinyLlama-1.1B-Chat-v1.0-GGUF", "llama", 1.1, WIDE),
    ("all-minilm", "22m", "second-state/All-MiniLM-L6-v2-Embedding-GGUF", "bert", 0.0227, COMMON),
    ("bge-small", "33m", "CompendiumLabs/bge-small-en-v1.5-gguf", "bert", 0.0334, FEW),
    ("bge-m3", "567m", "gpustack/bge-m3-GGUF", "bert", 0.567, COMMON),
    ("nomic-embed-text", "v1.5", "nomic-ai/nomic-embed-text-v1.5-GGUF", "nomic-bert", 0.137, WIDE),
    ("embeddinggemma", "300m", "ggml-org/embeddinggemma-300M-GGUF", "gemma-embedding", 0.303, EIGHT),
    ("qwen3-embedding", "0.6b", "Qwen/Qwen3-Embedding-0.6B-GGUF", "qwen3", 0.6, EIGHT),
    ("qwen3-embedding", "4b", "Qwen/Qwen3-Embedding-4B-GGUF", "qwen3", 4.02, COMMON),
    ("qwen3-embedding", "8b", "Qwen/Qwen3-Embedding-8B-GGUF", "qwen3", 7.57, COMMON),
)
CATALOGUE = tuple(CatalogueModel(*row) for row in _ROWS)


def lookup(ref: str) -> tuple[CatalogueModel, str] | None:
    """Returns the model and the quantization of `name`, `name:tag` or `name:tag-q8_0`; None if the catalogue lacks
    it.
    """
    name, _, tag = ref.lower().partition(":")
    tags = tags_of(name)
    if not tags:
        return None
    if tag in ("", "latest"):
        return next(iter(tags.values())), ""
    if tag in tags:
        return tags[tag], ""
    size, _, named = tag.rpartition("-")
    found = quantization(named)
    if not found:
        size = tag
    for suffix in SUFFIXES:
        size = size.removesuffix(suffix)
    return (tags[size], found) if size in tags else None


def name_of(model: CatalogueModel, quantization: str) -> str:
    return f"{model.full_name}-{quantization.lower()}" if quantization else model.full_name


@cache
def model_of(repo: str) -> CatalogueModel | None:
    return next((model for model in CATALOGUE if model.repo.lower() == repo.lower()), None)


@cache
def tags_of(name: str) -> dict[str, CatalogueModel]:
    return {model.tag: model for model in CATALOGUE if model.name == name}
