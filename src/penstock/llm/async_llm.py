"""Runs one model in a separate process, for the coroutines of one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from penstock.config import configure
from penstock.errors import InvalidRequest
from penstock.ipc.spawn import ProcessClient
from penstock.llm.engine_options import read_options
from penstock.llm.llm import as_derived
from penstock.llm.lora import LoraLike, LoRARequest, modelfile_adapters, several, use_of
from penstock.llm.outputs import EmbeddingOutput, PoolingRequestOutput, RequestOutput, RequestOutputKind
from penstock.llm.pending import PendingChoice, PendingOutput
from penstock.llm.requests import PromptLike, RequestMaker
from penstock.llm.tokenizer import ModelTokenizer
from penstock.model.load import load_text
from penstock.service_levels import NO_TARGETS, Targets
from penstock.store import DEFAULT, fetch, with_local_draft
from penstock.text import check_dimensions, embedding
from penstock.types import PAUSE_KEEP, PAUSE_MODES, AdapterUse, SamplingParams
from penstock.types.messages import DescribeWeights, Pause, RegisterAdapter, Resume, UpdateWeights


class AsyncEngineArgs:
    """Holds the arguments of an `AsyncLLM`, for `AsyncLLM.from_engine_args`."""

    def __init__(self, model: str | Path = DEFAULT, **options: Any) -> None:
        self.model = model
        self.options = options


class RunningRequest(NamedTuple):
    """Holds an active request, the tasks that read its answers, and the event that signals new output."""

    pending: PendingOutput
    tasks: list[asyncio.Task[None]]
    news: asyncio.Event


class AsyncLLM:
    """Runs one model, with the options of `LLM`. The engine process starts with the first request or with `start`."""

    def __init__(self, model: str | Path = DEFAULT, **options: Any) -> None:
        self._options = read_options(options)
        self._model = str(model)
        self._path = fetch(self._model)
        own = modelfile_adapters(self._model)
        self._own = tuple(AdapterUse(name) for name in own)
        config = with_local_draft(configure(self._path, self._options.engine))
        self._client = ProcessClient(replace(config, adapter=(*config.adapter, *own.values())))
        self._starting: asyncio.Task[RequestMaker] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._running: dict[str, RunningRequest] = {}

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> Self:
        """Builds an engine from these arguments."""
        return cls(engine_args.model, **engine_args.options)

    async def start(self) -> None:
        """Starts the engine and loads the tokenizer, or raises their error. It may be called twice."""
        await self._started()

    async def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoraLike = None,
        targets: Targets = NO_TARGETS,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the growing answer: the whole answer so far, or as `sampling_params.output_kind` requests. Leaving the
        generator early, or cancelling its task, aborts the request. `lora_request` names its adapters; `targets` are
        latency targets.
        """
        make = await self._started()
        uses = await self._uses(lora_request)
        pending = make.generation(make.prompt(prompt), sampling_params, request_id or "", uses, targets)
        async with aclosing(self._outputs(pending)) as outputs:
            async for output in outputs:
                yield output

    async def _uses(self, lora_request: LoraLike) -> list[AdapterUse]:
        given = several(lora_request)
        for one in given:
            if isinstance(one, LoRARequest) and one.lora_path:
                known = self._client.adapters.get(one.lora_name)
                if known is None or known.path != one.lora_path:
                    await self._client.ask(RegisterAdapter(one.lora_name, one.lora_path))
        return [*self._own, *map(use_of, given)]

    async def embed(
        self, prompt: PromptLike, *, pooling: str | None = None, dimensions: int | None = None
    ) -> PoolingRequestOutput[EmbeddingOutput]:
        """Returns the embedding of a prompt: see `LLM.embed`."""
        make = await self._started()
        check_dimensions(dimensions, make.limits.dim)
        pending = make.pooling(prompt, pooling)
        async with aclosing(self._outputs(pending)) as outputs:
            async for _ in outputs:
                pass
        (choice,) = pending.choices
        return PoolingRequestOutput(
            pending.id, EmbeddingOutput(embedding(choice.pooled, dimensions)), list(choice.request.prompt)
        )

    async def abort(self, request_id: str) -> None:
        """Aborts a request: its last output has the finish reason abort. A finished request is unaffected."""
        running = self._running.get(request_id)
        if running is None:
            return
        for choice, task in zip(running.pending.choices, running.tasks, strict=True):
            if not choice.finish_reason:
                choice.finish_reason = "abort"
                task.cancel()
        running.news.set()

    async def pause_generation(self, mode: str = PAUSE_KEEP) -> None:
        """Pauses the engine between two steps; new requests wait. Mode "keep" freezes running ones, "wait" completes
        them first, and "abort" ends them with their output so far.
        """
        if mode not in PAUSE_MODES:
            raise InvalidRequest(f"mode is one of {', '.join(PAUSE_MODES)}; got {mode!r}", param="mode")
        await self._started()
        await self._client.ask(Pause(mode))

    async def resume_generation(self) -> None:
        """Ends a pause."""
        await self._started()
        await self._client.ask(Resume())

    async def is_paused(self) -> bool:
        """Returns True while the engine is paused."""
        await self._started()
        return (await self._client.ask(DescribeWeights())).paused

    async def update_weights(self, path: str | Path, version: str = "", *, recompute: bool = True) -> str:
        """Replaces the model's weights and returns their version: see `LLM.update_weights`."""
        await self._started()
        return (await self._client.ask(UpdateWeights(str(path), version, recompute))).version

    async def get_tokenizer(self) -> ModelTokenizer:
        """Returns the model's tokenizer, with the methods that scripts use most."""
        return ModelTokenizer((await self._started()).text)

    def shutdown(self) -> None:
        """Starts to shut down the engine process without waiting for it."""
        self._closing = asyncio.get_running_loop().create_task(self.close())

    async def close(self) -> None:
        """Ends the engine process; active requests fail. It may be called twice."""
        await self._client.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _started(self) -> RequestMaker:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        make = await asyncio.shield(self._starting)
        await self._client.start()  # raises if the engine is closed or has failed for good
        return make

    async def _start(self) -> RequestMaker:
        loading = asyncio.create_task(asyncio.to_thread(load_text, self._path))
        hello = await self._client.start()
        options = self._options
        text = as_derived(await loading, self._model, options.sampling)
        return RequestMaker(text, hello.limits, self._client.next_id, options.seed, options.targets)

    async def _outputs(self, pending: PendingOutput) -> AsyncGenerator[RequestOutput, None]:
        if pending.id in self._running:
            raise InvalidRequest(f"a request with the id {pending.id!r} is being answered", param="request_id")
        news = asyncio.Event()
        tasks = [asyncio.create_task(self._collect(choice, news)) for choice in pending.choices]
        self._running[pending.id] = RunningRequest(pending, tasks, news)
        kind, returned = pending.params.output_kind, [0] * len(tasks)
        try:
            ended = False
            while not ended:
                await news.wait()
                news.clear()
                ended = pending.ended()
                if kind == RequestOutputKind.FINAL_ONLY and not ended:
                    continue
                output = pending.output(returned)
                if kind == RequestOutputKind.DELTA:
                    returned = [len(choice.deltas) for choice in pending.choices]
                yield output
        finally:
            del self._running[pending.id]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _collect(self, choice: PendingChoice, news: asyncio.Event) -> None:
        """Reads one answer to its end. Cancellation aborts its request."""
        try:
            async with aclosing(self._client.submit(choice.request)) as steps:
                async for events in steps:
                    choice.add(events)
                    news.set()
                    if choice.finish_reason:
                        return
        except Exception as error:  # even an unexpected error must reach the caller, who would otherwise wait forever
            choice.fail(error)
            news.set()
