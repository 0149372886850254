"""Turns free text into objects: the answer always matches the schema, whatever the model.

pip install openai
penstock serve
python examples/structured_output.py [URL]
"""

from __future__ import annotations

import sys
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
LETTERS = (
    "The page is blank since this morning and nobody can work!",
    "How can I change my password?",
    "I love the new colours.",
)


class Ticket(BaseModel):
    kind: Literal["bug", "question", "praise"]
    summary: str = Field(max_length=60)
    urgent: bool


client = OpenAI(base_url=f"{URL}/v1", api_key="none")
for letter in LETTERS:
    answer = client.chat.completions.parse(
        model="smollm2",
        messages=[{"role": "user", "content": f"Describe this letter as a ticket: {letter}"}],
        response_format=Ticket,
        max_tokens=120,
        temperature=0,
    )
    print(answer.choices[0].message.parsed)
