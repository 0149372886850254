"""Makes prompts from pairs of texts, such as a query and a document, and scores from a classifier's logits."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.errors import ContextTooLong, InvalidRequest
from penstock.text.chat import ChatTemplate
from penstock.text.embedding import Vector
from penstock.text.hf_tokenizer import read_json
from penstock.text.tokenizer import PairTokens, Tokenizer
from penstock.types import Limits, Request, SamplingParams

if TYPE_CHECKING:
    from penstock.templates.process import RenderProcess

NAMES = ("rerank", "reranker")  # names of templates stored next to a chat template
SLOTS = re.compile(r"\{(query|document|instruction)\}")
ROLES = re.compile(r"""["']query["'].*["']document["']""", re.DOTALL)  # roles in a template's messages
QWEN3 = (  # the template of Qwen3 rerankers, whose folders have none
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PROMPTS = "config_sentence_transformers.json"
QWEN3_HEADING = "# Qwen3-Reranker"  # heading of their model card


class PairTemplate(NamedTuple):
    """Renders the prompt in which a generative reranker judges a document."""

    source: str  # contains {query}, {document} and optionally {instruction}
    chat: ChatTemplate | None = None  # alternative: a chat template with query and document roles
    instruction: str = ""  # default

    @property
    def instructed(self) -> bool:
        return self.chat is not None or "{instruction}" in self.source

    def isolated(self, process: RenderProcess) -> PairTemplate:
        return self._replace(chat=self.chat and self.chat.isolated(process))

    def render(self, query: str, document: str, instruction: str = "") -> str:
        told = instruction or self.instruction
        if self.chat is None:
            parts = {"query": query, "document": document, "instruction": told}
            return SLOTS.sub(lambda slot: parts[slot[1]], self.source)
        messages = [*([("system", told)] if told else []), ("query", query), ("document", document)]
        return self.chat.render([{"role": role, "content": text} for role, text in messages])


def pair_template(templates: Mapping[str, str], tokens: Mapping[str, str], path: Path | None) -> PairTemplate | None:
    """Returns a model's pair template, if any; `path` is its folder."""
    for name in NAMES:
        if name in templates:
            return _template(templates[name], tokens, path)
    if ROLES.search(templates.get("default", "")):
        return _template(templates["default"], tokens, path)
    return PairTemplate(QWEN3, instruction=QWEN3_INSTRUCTION) if path and is_qwen3_reranker(path) else None


def is_qwen3_reranker(folder: Path) -> bool:
    """Returns True if a folder's model card names a Qwen3 reranker; the config does not."""
    card = folder / "README.md"
    return card.is_file() and QWEN3_HEADING in card.read_text("utf-8", "replace")


def _template(source: str, tokens: Mapping[str, str], path: Path | None) -> PairTemplate:
    told = read_json(path / PROMPTS) if path else {}
    prompts, name = told.get("prompts"), told.get("default_prompt_name")
    instruction = prompts.get(name) if isinstance(prompts, dict) else None
    chat = None if "{query}" in source else ChatTemplate({"default": source}, tokens)
    return PairTemplate("" if chat else source, chat, instruction if isinstance(instruction, str) else "")


class PairPrompts:
    """Encodes pairs for one model, in at most `longest` tokens each: a longer document is cut if `cut`, and refused
    otherwise. Only the first `document_tokens` of a document are used. Generative rerankers receive `instruction`, or
    their default.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: PairTemplate | None,
        limits: Limits,
        *,
        longest: int | None = None,
        cut: bool = False,
        document_tokens: int | None = None,
        instruction: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._second_text = limits.second_text
        self._longest = min(longest or limits.max_len, limits.max_len)
        self._cut = cut
        self._document_tokens = document_tokens
        self._instruction = instruction

    def encode(self, first: str, second: str, param: str) -> list[int]:
        """Returns the token ids of a pair. `param` is the second text's field for errors."""
        if self._document_tokens is not None:
            second = self._beginning(second, self._document_tokens)
        if self._template is None:
            found = self._tokenizer.encode_pair(first, second)
            self._check(len(found.ids), param)
            return self._marked(found.cut_to(self._longest))
        ids = self._rendered(self._template, first, second)
        if len(ids) > self._longest and self._cut:
            excess = len(ids) - self._longest
            shorter = self._beginning(second, max(len(self._tokenizer.encode(second)) - excess, 0))
            ids = self._rendered(self._template, first, shorter)
        self._check(len(ids), param)
        return ids

    def _beginning(self, text: str, count: int) -> str:
        """Returns the text of the first `count` tokens."""
        ids = self._tokenizer.encode(text)
        return text if len(ids) <= count else self._tokenizer.decode(ids[:count])

    def _rendered(self, template: PairTemplate, first: str, second: str) -> list[int]:
        prompt = template.render(first, second, self._instruction)
        return self._tokenizer.encode(prompt, special=True, bos=True)

    def _marked(self, found: PairTokens) -> list[int]:
        """Offsets the ids of the second text's tokens to its copy in the model's table."""
        return [id + kind * self._second_text for id, kind in zip(found.ids, found.types, strict=True)]

    def _check(self, count: int, param: str) -> None:
        if count > self._longest and not (self._cut and self._template is None):
            raise ContextTooLong(
                f"{param} and the query have {count} tokens and the context holds {self._longest}: shorten them, or "
                "ask for truncation",
                param=param,
            )


def check_scores(limits: Limits) -> None:
    """Raises InvalidRequest if a model cannot score pairs, which takes one label or embeddings."""
    if len(limits.labels) > 1:
        raise InvalidRequest(
            f"this model has {len(limits.labels)} labels ({', '.join(limits.labels[:3])}...) and a score needs a model "
            "with one: send texts to /classify, or to LLM.classify",
            param="model",
        )
    if not limits.labels and limits.generates:
        raise InvalidRequest(
            "this model cannot score: it has no classification head, and no template for reranking; take a reranker or "
            "an embedding model",
            param="model",
        )


def check_labels(limits: Limits) -> None:
    """Raises InvalidRequest for a model without labels."""
    if not limits.labels:
        raise InvalidRequest("this model cannot classify: it has no classification head", param="model")


def classify_request(id: int, prompt: list[int], limits: Limits, param: str) -> Request:
    if not prompt:
        raise InvalidRequest(f"{param} is empty: at least one token is needed", param=param)
    if len(prompt) > limits.max_len:
        raise ContextTooLong(
            f"{param} has {len(prompt)} tokens and the context holds {limits.max_len}: shorten it", param=param
        )
    return Request(id, tuple(prompt), SamplingParams(), 0, pooling="classify")


def scores(logits: Vector, activation: str) -> list[float]:
    found: list[float] = ACTIVATIONS[activation](logits.astype(np.float64)).tolist()
    return found


def _softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max())
    return np.asarray(powers / powers.sum())


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.exp(-np.logaddexp(0, -x)))


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "sigmoid": _sigmoid,
    "softmax": _softmax,
    "identity": lambda x: x,
}


def cosine(first: Vector, second: Vector) -> float:
    return float(first.astype(np.float64) @ second.astype(np.float64))
