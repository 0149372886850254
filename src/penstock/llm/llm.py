"""Runs one model in this process, for blocking calls from any number of threads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

from penstock.config import configure, parse_adapter
from penstock.engine.build import build_engine
from penstock.engine.model_loading import open_configured
from penstock.errors import InvalidRequest
from penstock.ipc.inprocess_engine import InProcessEngine
from penstock.llm.beams import BeamSearchOutput, BeamSearchParams, search_beams
from penstock.llm.engine_options import read_options
from penstock.llm.lora import LoraArgument, LoraLike, LoRARequest, lora_list, modelfile_adapters, use_of
from penstock.llm.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
)
from penstock.llm.pending import PendingOutput
from penstock.llm.requests import (
    ChatOptions,
    PromptLike,
    RequestMaker,
    conversation_list,
    params_list,
    prompt_list,
)
from penstock.llm.shared_engine import SharedEngine, ShowProgress
from penstock.llm.tokenizer import ModelTokenizer
from penstock.model.load import text_of
from penstock.service_levels import NO_TARGETS, Targets
from penstock.store import DEFAULT, fetch, find_derived, with_local_draft
from penstock.text import Text, check_dimensions, embedding
from penstock.text.embedding import state_of
from penstock.text.pairs import check_labels, check_scores, cosine, scores
from penstock.text.sampling_defaults import defaults_in_modelfile
from penstock.text.text import with_modelfile
from penstock.text.tools import MessageDict
from penstock.types import AdapterInfo, AdapterUse, SamplingParams
from penstock.types.messages import (
    FlushCache,
    ListAdapters,
    RegisterAdapter,
    UnregisterAdapter,
    UpdateWeights,
)

T = TypeVar("T")
Params = SamplingParams | Sequence[SamplingParams] | None
Prompts = PromptLike | Sequence[PromptLike]
Conversation = Sequence[MessageDict]


class LLM:
    """Runs one model. Keyword arguments are the engine's options (`penstock.config`) or vLLM's names for them; vLLM
    options without effect are listed in a warning. `targets` are the default latency targets. Threads may share an
    instance: their requests are batched together.
    """

    def __init__(self, model: str | Path = DEFAULT, **options: Any) -> None:
        read = read_options(options)
        path = fetch(str(model))
        own = modelfile_adapters(str(model))
        self._own = tuple(AdapterUse(name) for name in own)
        config = configure(path, read.engine)
        self._adapters = {name: path for name, path, _ in map(parse_adapter, config.adapter)}
        config = replace(with_local_draft(config), adapter=(*config.adapter, *own.values()))
        checkpoint = open_configured(config)
        text = _start(lambda: text_of(checkpoint))  # the tokenizer is read while native code packs weights
        engine = InProcessEngine(lambda: build_engine(config, checkpoint), config.name)
        limits = engine.open().limits
        self._engine = SharedEngine(engine)
        try:
            derived = as_derived(text(), str(model), read.sampling)
            self._maker = RequestMaker(derived, limits, itertools.count(1).__next__, read.seed, read.targets)
        except BaseException:
            self._engine.close()
            raise

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        use_tqdm: ShowProgress = True,
        lora_request: LoraArgument = None,
        targets: Targets = NO_TARGETS,
    ) -> list[RequestOutput]:
        """Continues one prompt or a list: texts, lists of token ids, or dictionaries with `prompt` or
        `prompt_token_ids`. Without `sampling_params`, the model's own defaults apply. `lora_request` names the adapters
        of all prompts, or is a list with one entry per prompt. `targets` are latency targets.
        """
        given = prompt_list(prompts)
        params = params_list(sampling_params, len(given))
        adapters = self._uses(lora_request, len(given))
        make = self._maker
        pending = [
            make.generation(make.prompt(each), how, adapters=uses, targets=targets)
            for each, how, uses in zip(given, params, adapters, strict=True)
        ]
        self._engine.complete(pending, use_tqdm)
        return [each.output() for each in pending]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        use_tqdm: ShowProgress = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoraArgument = None,
        targets: Targets = NO_TARGETS,
    ) -> list[RequestOutput]:
        """Returns the assistant's next message in one conversation (a list of messages) or in each of several. `tools`
        and `chat_template_kwargs` go to the chat template. `targets` are latency targets.
        """
        given = conversation_list(messages)
        params = params_list(sampling_params, len(given))
        adapters = self._uses(lora_request, len(given))
        options = ChatOptions(
            chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs or {}
        )
        make = self._maker
        pending = [
            make.generation(make.chat_prompt(each, options), how, adapters=uses, targets=targets)
            for each, how, uses in zip(given, params, adapters, strict=True)
        ]
        self._engine.complete(pending, use_tqdm)
        return [each.output() for each in pending]

    def stream(
        self,
        prompt: PromptLike | Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoraLike = None,
        targets: Targets = NO_TARGETS,
    ) -> CompletionStream:
        """Streams one answer as text: like `generate` or, for messages, like `chat`."""
        make = self._maker
        is_chat = not isinstance(prompt, str | Mapping) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        read = make.chat_prompt(prompt, ChatOptions()) if is_chat else make.prompt(prompt)  # type: ignore[arg-type]
        (uses,) = self._uses(lora_request, 1)
        pending = make.generation(read, sampling_params, adapters=uses, targets=targets)
        if len(pending.choices) > 1:
            raise InvalidRequest("a stream has one answer: leave out n and best_of, or use generate", param="n")
        self._engine.submit(pending.choices)
        return CompletionStream(pending, self._engine.stream(pending.choices[0]))

    def embed(
        self,
        prompts: Prompts,
        *,
        use_tqdm: ShowProgress = True,
        truncate_prompt_tokens: int | None = None,
        pooling: str | None = None,
        dimensions: int | None = None,
        lora_request: LoraArgument = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Returns the embedding of each prompt, as `.outputs.embedding` (a list) and `.outputs.vector` (an array).

        An embedding is the pooled final hidden states, normalized to length 1. `pooling` is "mean" (of all tokens),
        "last" (token) or "cls" (the first token); None selects the model's own. `dimensions` keeps only the leading
        values.
        """
        check_dimensions(dimensions, self._maker.limits.dim)
        pending = self._pool(prompts, pooling, truncate_prompt_tokens, use_tqdm, lora_request)
        return [_pooled(each, EmbeddingOutput(embedding(each.choices[0].pooled, dimensions))) for each in pending]

    def encode(
        self, prompts: Prompts, *, use_tqdm: ShowProgress = True, pooling: str | None = None
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Returns the pooled hidden states of each prompt as `.outputs.data`: an embedding before normalization."""
        pending = self._pool(prompts, pooling, None, use_tqdm)
        return [_pooled(each, PoolingOutput(state_of(each.choices[0].pooled))) for each in pending]

    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], *, use_tqdm: ShowProgress = True
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Scores each text of `data_2` against the single text of `data_1`, or against the one at the same index, as
        `.outputs.score`. A reranker scores each pair; an embedding model returns the cosine of two embeddings.
        """
        make, pairs = self._maker, text_pairs(data_1, data_2)
        check_scores(make.limits)
        if not make.limits.labels:
            texts = {text: place for place, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
            embedded = self.embed(list(texts), use_tqdm=use_tqdm)
            return [cosine_score(*(embedded[texts[text]] for text in pair)) for pair in pairs]
        prompts = make.pair_prompts()
        pending = [make.classification(prompts.encode(*pair, "data_2")) for pair in pairs]
        return [_pooled(each, ScoringOutput(probs[0])) for each, probs in self._classify(pending, use_tqdm)]

    def classify(
        self, prompts: Prompts, *, use_tqdm: ShowProgress = True
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Classifies each prompt; returns the score of each label as `.outputs.probs`."""
        make = self._maker
        check_labels(make.limits)
        read = [make.prompt(each, make.text.encode_whole) for each in prompt_list(prompts)]
        pending = [make.classification(each.tokens, each.text) for each in read]
        return [_pooled(each, ClassificationOutput(probs)) for each, probs in self._classify(pending, use_tqdm)]

    def beam_search(self, prompts: Prompts, params: BeamSearchParams) -> list[BeamSearchOutput]:
        """Returns the likeliest continuations of each prompt by beam search, best first."""
        return search_beams(self._maker, self._engine, prompt_list(prompts), params)

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache before the next step: later prompts are computed anew. It always succeeds."""
        self._engine.inner.send(FlushCache())
        return True

    def get_tokenizer(self) -> ModelTokenizer:
        """Returns the model's tokenizer, with the methods that scripts use most."""
        return ModelTokenizer(self._maker.text)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the model's default sampling."""
        return self._maker.text.sampling()

    def sampling_params(self, **given: Any) -> SamplingParams:
        """Returns the model's default sampling, overridden by arguments that are not None."""
        return self._maker.text.sampling(**given)

    def check_answers(self) -> None:
        """Raises InvalidRequest if the model only makes embeddings."""
        self._maker.check_answers()

    def close(self) -> None:
        """Frees the model. Waiting calls of other threads fail. It may be called twice."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _uses(self, lora_request: LoraArgument, count: int) -> list[tuple[AdapterUse, ...]]:
        given = lora_list(lora_request, count)
        for one in dict.fromkeys(one for several in given for one in several):
            if isinstance(one, LoRARequest) and one.lora_path and self._adapters.get(one.lora_name) != one.lora_path:
                self.register_adapter(one.lora_name, one.lora_path)
        return [(*self._own, *map(use_of, several)) for several in given]

    def register_adapter(self, name: str, path: str | Path, scale: float = 1.0) -> AdapterInfo:
        """Registers a LoRA adapter under a name: a PEFT folder or a GGUF file. Raises AdapterError if it does not fit
        the model or the name is taken.
        """
        registered = self._engine.ask(RegisterAdapter(name, str(path), scale, id=self._maker.next_id()))
        self._adapters[name] = str(path)
        return registered.adapters[0]

    def unregister_adapter(self, name: str) -> AdapterInfo:
        """Removes an adapter; raises AdapterNotFound for an unknown name."""
        forgotten = self._engine.ask(UnregisterAdapter(name, id=self._maker.next_id()))
        self._adapters.pop(name, None)
        return forgotten.adapters[0]

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Returns the names of the registered adapters."""
        return tuple(self._adapters)

    def list_adapters(self) -> tuple[AdapterInfo, ...]:
        """Returns all registered adapters."""
        return self._engine.ask(ListAdapters(id=self._maker.next_id())).adapters

    def update_weights(self, path: str | Path, version: str = "", *, recompute: bool = True) -> str:
        """Replaces the weights with a folder's or GGUF file's for the same model; returns their version, by default the
        number of the update. Answers of other threads continue: their KV is recomputed unless `recompute` is False.
        Raises WeightsError if the weights do not fit.
        """
        return self._engine.ask(UpdateWeights(str(path), version, recompute, id=self._maker.next_id())).version

    def _pool(
        self,
        prompts: Prompts,
        pooling: str | None,
        truncate: int | None,
        use_tqdm: ShowProgress,
        lora_request: LoraArgument = None,
    ) -> list[PendingOutput]:
        given = prompt_list(prompts)
        adapters = self._uses(lora_request, len(given))
        pending = [
            self._maker.pooling(each, pooling, truncate, uses) for each, uses in zip(given, adapters, strict=True)
        ]
        self._engine.complete(pending, use_tqdm)
        return pending

    def _classify(
        self, pending: Sequence[PendingOutput], use_tqdm: ShowProgress
    ) -> list[tuple[PendingOutput, list[float]]]:
        self._engine.complete(pending, use_tqdm)
        activation = self._maker.limits.activation
        return [(each, scores(state_of(each.choices[0].pooled), activation)) for each in pending]


class CompletionStream(Iterator[str]):
    """Yields the text of one answer as it is generated. Dropping or closing it early aborts the request."""

    def __init__(self, pending: PendingOutput, pieces: Generator[str]) -> None:
        self._pending = pending
        self._pieces = pieces
        next(pieces)

    def __next__(self) -> str:
        return next(self._pieces)

    def rest(self) -> RequestOutput:
        """Reads to the end and returns the whole answer."""
        for _ in self:
            pass
        return self.completion

    def close(self) -> None:
        self._pieces.close()

    @property
    def completion(self) -> RequestOutput:
        """Returns the answer so far; the whole answer once the stream has ended."""
        return self._pending.output()


def as_derived(text: Text, model: str, sampling: Mapping[str, Any]) -> Text:
    derived = find_derived(model)
    if derived is None:
        return text.with_sampling(sampling)
    messages = [{"content": "", **message} for message in derived.messages]
    sampling = {**defaults_in_modelfile(derived.parameters), **sampling}
    return with_modelfile(text, derived.system, derived.template, messages, sampling)


def _pooled(pending: PendingOutput, output: T) -> PoolingRequestOutput[T]:
    return PoolingRequestOutput(pending.id, output, list(pending.choices[0].request.prompt))


def text_pairs(data_1: str | Sequence[str], data_2: str | Sequence[str]) -> list[tuple[str, str]]:
    ones, others = ([data] if isinstance(data, str) else list(data) for data in (data_1, data_2))
    if len(ones) not in (1, len(others)):
        raise InvalidRequest(
            f"data_1 has {len(ones)} texts and data_2 {len(others)}: give one text, or as many as data_2",
            param="data_1",
        )
    return list(zip(ones * len(others) if len(ones) == 1 else ones, others, strict=True))


def cosine_score(
    one: PoolingRequestOutput[EmbeddingOutput], other: PoolingRequestOutput[EmbeddingOutput]
) -> PoolingRequestOutput[ScoringOutput]:
    output = ScoringOutput(cosine(one.outputs.vector, other.outputs.vector))
    return PoolingRequestOutput(other.request_id, output, [*one.prompt_token_ids, *other.prompt_token_ids])


def _start(work: Callable[[], T]) -> Callable[[], T]:
    """Starts the work in a thread. Returns a function that waits for its result or raises its error."""
    results: list[T] = []
    failures: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            failures.append(error)

    def result() -> T:
        thread.join()
        for error in failures:
            raise error
        return results[0]

    thread = threading.Thread(target=run, name="penstock-text")
    thread.start()
    return result
