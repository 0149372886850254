"""Asks several questions at once, and says when each answer began and how fast it came.

pip install openai
penstock serve
python examples/streaming.py [URL]
"""

from __future__ import annotations

import asyncio
import sys
import time

from openai import AsyncOpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
QUESTIONS = ("Why is the sky blue?", "What is a lock in a canal?", "How does a kite fly?", "What is rain?")


async def ask(client: AsyncOpenAI, question: str) -> str:
    """Returns one line about the answer to a question."""
    began, times, usage = time.perf_counter(), [], None
    stream = await client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": question}],
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        if chunk.choices and chunk.choices[0].delta.content:
            times.append(time.perf_counter())
    first, tokens = times[0] - began, usage.completion_tokens
    speed = (tokens - 1) / (times[-1] - times[0])
    return f"{question:30} first token after {first * 1000:.0f} ms, then {speed:.0f} tokens per second"


async def main() -> None:
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as client:
        for line in await asyncio.gather(*(ask(client, question) for question in QUESTIONS)):
            print(line)


asyncio.run(main())
