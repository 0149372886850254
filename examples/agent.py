"""Runs a small agent with Anthropic's SDK: it looks at files with tools until it has an answer, or after four turns.

The default model is too small to plan, so each turn's call is forced; take `tool_choice` away with a larger one.

    pip install anthropic
    penstock serve
    python examples/agent.py [URL]
"""

from __future__ import annotations

import sys
from pathlib import Path

from anthropic import Anthropic

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
FOLDER = Path(__file__).parent
FILES = sorted(path.name for path in FOLDER.glob("*.py"))
TOOLS = [
    {
        "name": "read_file",
        "description": "Returns the first lines of a file.",
        "input_schema": {
            "type": "object",
            "properties": {"name": {"type": "string", "enum": FILES}},
            "required": ["name"],
            "additionalProperties": False,
        },
    },
    {
        "name": "answer",
        "description": "Gives the answer, and ends the task.",
        "input_schema": {
            "type": "object",
            "properties": {"text": {"type": "string", "maxLength": 200}},
            "required": ["text"],
            "additionalProperties": False,
        },
    },
]

client = Anthropic(base_url=URL, api_key="none")
messages = [{"role": "user", "content": f"These files are here: {', '.join(FILES)}. What does one of them do?"}]
for turn in range(4):
    wanted = {"type": "tool", "name": "answer"} if turn else {"type": "tool", "name": "read_file"}
    reply = client.messages.create(model="smollm2", messages=messages, tools=TOOLS, tool_choice=wanted, max_tokens=150)
    call = next(block for block in reply.content if block.type == "tool_use")
    print(f"turn {turn + 1}: {call.name}({call.input})")
    if call.name == "answer":
        break
    lines = (FOLDER / call.input["name"]).read_text().splitlines()[:5]
    messages.append({"role": "assistant", "content": reply.content})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "\n".join(lines)}
    messages.append({"role": "user", "content": [result]})
