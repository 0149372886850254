"""Lets the model call a function. The call is forced, so that even a very small model makes it, with valid arguments.

pip install openai
penstock serve
python examples/tools.py [URL]
"""

from __future__ import annotations

import json
import sys

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
CITIES = {"Paris": 18, "Oslo": 4, "Cairo": 31}
WEATHER = {
    "type": "function",
    "function": {
        "name": "temperature",
        "description": "Returns the temperature in a city, in degrees Celsius.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": list(CITIES)}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}

client = OpenAI(base_url=f"{URL}/v1", api_key="none")
messages = [{"role": "user", "content": "How warm is it in Oslo?"}]
settings = {"model": "smollm2", "messages": messages, "max_tokens": 60, "temperature": 0}

asked = client.chat.completions.create(tools=[WEATHER], tool_choice="required", **settings).choices[0].message
messages.append(asked.model_dump(exclude_none=True))
for call in asked.tool_calls:
    city = json.loads(call.function.arguments)["city"]
    print(f"the model calls {call.function.name}({city!r})")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{CITIES[city]} degrees in {city}"})
messages.append({"role": "user", "content": "Say that in a sentence."})  # a larger model would anyway

print(client.chat.completions.create(**settings).choices[0].message.content)
