"""Sends a file of requests as a batch, waits for its end, and prints the answers in their order.

pip install openai
penstock serve
python examples/batch.py [URL]
"""

from __future__ import annotations

import json
import sys
import time

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
QUESTIONS = ("Name a river.", "Name a mountain.", "Name a lake.", "Name an island.")


def line(number: int, question: str) -> str:
    """Returns one line of the file."""
    body = {"model": "smollm2", "messages": [{"role": "user", "content": question}], "max_tokens": 20}
    return json.dumps({"custom_id": f"q{number}", "method": "POST", "url": "/v1/chat/completions", "body": body})


client = OpenAI(base_url=f"{URL}/v1", api_key="none")
lines = "\n".join(line(number, question) for number, question in enumerate(QUESTIONS))
sent = client.files.create(file=("questions.jsonl", lines.encode()), purpose="batch")
batch = client.batches.create(input_file_id=sent.id, endpoint="/v1/chat/completions", completion_window="24h")
while batch.status not in ("completed", "failed", "cancelled", "expired"):
    time.sleep(0.2)
    batch = client.batches.retrieve(batch.id)
print(batch.status, batch.request_counts)

for answer in client.files.content(batch.output_file_id).text.splitlines():
    told = json.loads(answer)
    print(told["custom_id"], told["response"]["body"]["choices"][0]["message"]["content"])
