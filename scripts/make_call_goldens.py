"""Makes tests/text/data/calls.json: what chat templates themselves render for an assistant that calls tools.

    python scripts/make_call_goldens.py FOLDER_OF_JINJA_FILES

Each entry is the assistant's turn as its model would say it: after the generation prompt, without the end of turn.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from penstock.errors import InvalidRequest
from penstock.text import ChatTemplate

GOLDENS = Path(__file__).parent.parent / "tests" / "text" / "data" / "calls.json"
NAMES = {  # of the files, and the families they stand for
    "GLM-4.7-Flash": "glm",
    "MiniMax-M1": "minimax-m1",
    "MiniMax-M2": "minimax",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral-list",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3-Coder": "qwen-coder",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "qwen-coder",
    "GigaChat3.1-10B-A1.8B": "gigachat",
    "unsloth-Apriel-1.5": "apriel",
    "ByteDance-Seed-OSS": "seed",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek-r1",
    "deepseek-ai-DeepSeek-V3.1": "deepseek-v3.1",
    "deepseek-ai-DeepSeek-V3.2": "deepseek-dsml",
    "deepseek-ai-DeepSeek-V4-Flash-0731": "deepseek-v4",
    "google-gemma-4-31B-it": "gemma",
    "google-gemma-2-2b-it": "json",
    "meetkai-functionary-medium-v3.1": "functionary",
    "meta-llama-Llama-3.1-8B-Instruct": "llama",
    "moonshotai-Kimi-K2": "kimi",
    "openai-gpt-oss-120b": "harmony",
    "upstage-Solar-Open-100B": "solar",
}
ALONE = ("deepseek-r1", "json")  # calls do not stand beside content
ENDS = re.compile(
    r"(<\|im_end\|>|<EOS>|\[e~\[|<｜end▁of▁sentence｜>|<\|eot_id\|>|<turn\|>|<\|tool_response>|<end_of_sentence>"
    r"|<\|call\|>|<seed:eos>|<SPECIAL_12>|<\|message_sep\|>|<\|eom_id\|>|<end_of_turn>|<\|end\|>)?\s*(<EOS>)?\s*$"
)
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "metric": {"type": "boolean"},
        "near": {"type": "object"},
    },
    "required": ["city"],
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "description": "Time.", "parameters": NOTHING}},
]
ARGUMENTS: list[dict[str, Any]] = [
    {"city": 'Zürich "north" \\ é\nline {x}', "days": 3, "metric": True, "near": {"km": [1.5, None]}},
    {},
]
USER = {"role": "user", "content": "Will it rain?"}


def main(folder: Path) -> None:
    goldens = [
        {"template": name, "family": family, **turn}
        for name, family in NAMES.items()
        for turn in turns((folder / f"{name}.jinja").read_text(), family)
    ]
    GOLDENS.write_text(json.dumps({"tools": TOOLS, "turns": goldens}, ensure_ascii=False, indent=1) + "\n")


def turns(source: str, family: str) -> list[dict[str, Any]]:
    template = ChatTemplate({"default": source}, {"bos_token": "<BOS>", "eos_token": "<EOS>"})
    assert template.format.tool_format.name == family, (template.format.tool_format.name, family)
    found = []
    for count in (1, 2):
        for content in (None,) if family in ALONE else (None, "Let me look."):
            try:
                found.append(turn(template, content, count))
            except InvalidRequest as error:
                print(f"{family}, {count} calls, content {content!r}: {error}", file=sys.stderr)
    return found


def turn(template: ChatTemplate, content: str | None, count: int) -> dict[str, Any]:
    functions = [
        {"name": name, "arguments": arguments}
        for name, arguments in zip(("get_weather", "now"), ARGUMENTS, strict=True)
    ][:count]
    calls = [{"id": f"abcdefgh{i}", "type": "function", "function": f} for i, f in enumerate(functions)]
    said = {"role": "assistant", "content": content, "tool_calls": calls, "reasoning_content": "I wonder."}
    said["reasoning"] = said["reasoning_content"]
    prompt = template.render([USER], tools=TOOLS)
    whole = template.render([USER, said], tools=TOOLS, add_generation_prompt=False)
    opening, closing = template.format.reasoning or ("", "")
    if not whole.startswith(prompt):
        for marker in (closing, opening):
            prompt = prompt.rstrip().removesuffix(marker)
        assert whole.startswith(prompt.rstrip()), (prompt[-60:], whole[len(prompt) - 60 :])
        prompt = prompt.rstrip()
    text = ENDS.sub("", whole[len(prompt) :])
    opened = template.format.opened(prompt)
    if closing and not opened and text.lstrip().startswith(closing):
        text = text.lstrip().removeprefix(closing)
    content, thought = content if content and content in text else "", "I wonder." if "I wonder." in text else ""
    if template.format.tool_format.channels:
        content, thought = "", content  # this template takes it for a thought
    return {
        "opened": opened,
        "reasoning": template.format.reasoning,
        "text": text,
        "content": content,
        "thought": thought,
        "calls": [function for function in functions if function["name"] in text],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
