"""Runs models in scripts: `LLM` for blocking calls and `AsyncLLM` for asyncio, both shaped like vLLM's.

with LLM("smollm2") as llm:
    for output in llm.generate(["The sky is blue because"], SamplingParams(max_tokens=40)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

from penstock.llm.llm import LLM, CompletionStream

__all__ = ["LLM", "CompletionStream"]
