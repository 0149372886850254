"""Has a conversation of three turns with a server, and prints each answer as it comes.

pip install openai
penstock serve
python examples/chat.py [URL]
"""

from __future__ import annotations

import sys

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
QUESTIONS = ("Name a river in Europe.", "Through which countries does it flow?", "Thank you!")

client = OpenAI(base_url=f"{URL}/v1", api_key="none")
messages = [{"role": "system", "content": "You answer in one sentence."}]
for question in QUESTIONS:
    print(f"> {question}")
    messages.append({"role": "user", "content": question})
    answer = ""
    with client.chat.completions.create(model="smollm2", messages=messages, max_tokens=60, stream=True) as stream:
        for chunk in stream:
            piece = chunk.choices[0].delta.content or ""
            print(piece, end="", flush=True)
            answer += piece
    print()
    messages.append({"role": "assistant", "content": answer})
