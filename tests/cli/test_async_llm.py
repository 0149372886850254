"""AsyncLLM: the same engine in a process of its own, for coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from penstock import AsyncEngineArgs, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams, Targets
from penstock.errors import InvalidRequest, PenstockError

RECITED = "abcdefghijklménopqrstuvwxyz"


def with_llm(path: Path, use: Callable[[AsyncLLM], Awaitable[None]]) -> None:
    async def main() -> None:
        args = AsyncEngineArgs(model=str(path), device="ref", max_model_len=512)
        async with AsyncLLM.from_engine_args(args) as llm:
            await use(llm)

    asyncio.run(main())


async def outputs(llm: AsyncLLM, prompt: Any, **params: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, SamplingParams(max_tokens=None, **params))]


def test_answers_grow(reciter: Path) -> None:
    async def use(llm: AsyncLLM) -> None:
        grown = await outputs(llm, "abc")
        lengths = [len(output.text) for output in grown]
        assert [output.text for output in grown] == [RECITED[3 : 3 + length] for length in lengths]
        assert [output.finished for output in grown] == [False] * (len(grown) - 1) + [True]
        assert (grown[-1].text, grown[-1].finish_reason) == (RECITED[3:], "stop")
        deltas = await outputs(llm, {"prompt": "uv"}, output_kind=RequestOutputKind.DELTA, n=2)
        for choice in range(2):
            assert "".join(output.outputs[choice].text for output in deltas) == "wxyz"
        (whole,) = await outputs(llm, "uv", output_kind=RequestOutputKind.FINAL_ONLY, stop="z")
        assert (whole.text, whole.outputs[0].stop_reason) == ("wxy", "z")
        together = await asyncio.gather(*(outputs(llm, RECITED[:length]) for length in range(1, 9)))
        assert [each[-1].text for each in together] == [RECITED[length:] for length in range(1, 9)]
        default = [output async for output in llm.generate("uv", targets=Targets(itl=0.05))]
        assert default[-1].text == "wxyz"
        embedded = await llm.embed("uv", dimensions=8)
        assert len(embedded.outputs.embedding) == 8
        assert (await llm.get_tokenizer()).decode(whole.prompt_token_ids) == "uv"
        with pytest.raises(InvalidRequest, match="from 0 to 257"):
            await outputs(llm, [999])
        with pytest.raises(InvalidRequest, match="from 0 to 257"):
            await asyncio.wait_for(outputs(llm, [2**70]), 30)  # more than a message can hold
        with pytest.raises(InvalidRequest, match="targets are"):
            await anext(llm.generate("uv", targets=Targets(itl=0)))

    with_llm(reciter, use)


def test_requests_can_be_aborted_and_left(babbler: Path) -> None:
    async def use(llm: AsyncLLM) -> None:
        async with aclosing(llm.generate("abc", SamplingParams(max_tokens=None), "mine")) as stream:
            first = await anext(stream)
            assert not first.finished
            assert await anext(output async for output in stream if len(output.text) > len(first.text))
            with pytest.raises(InvalidRequest, match="a request with the id 'mine'"):
                await anext(llm.generate("abc", SamplingParams(max_tokens=None), "mine"))
            await llm.abort("mine")
            rest = [output async for output in stream]
        assert (rest[-1].finish_reason, rest[-1].finished) == ("abort", True)
        await llm.abort("mine")  # it has ended: nothing happens
        left = asyncio.create_task(outputs(llm, "abc"))
        async with asyncio.timeout(20):
            while not llm._running:
                await asyncio.sleep(0)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        async with asyncio.timeout(20):
            while llm._client.stats.running or llm._client.stats.waiting:
                await asyncio.sleep(0.01)
        assert not llm._running

    with_llm(babbler, use)


def test_an_error_that_nobody_expects_ends_its_request(reciter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError

    async def use(llm: AsyncLLM) -> None:
        await llm.start()
        monkeypatch.setattr(llm._client, "submit", fail)
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(outputs(llm, "abc"), 30)

    with_llm(reciter, use)


def test_a_closed_one_says_so(babbler: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(babbler, device="ref", speculation="off")  # which would answer all of it in a few steps
        await llm.start()
        stream = llm.generate("a", SamplingParams(max_tokens=None))
        await anext(stream)
        await llm.close()
        await llm.close()
        with pytest.raises(PenstockError, match="the engine is closed"):
            async for _ in stream:
                pass
        with pytest.raises(PenstockError, match="the engine is closed"):
            await outputs(llm, "a")

    asyncio.run(main())
