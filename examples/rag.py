"""Answers a question from a few notes: embeds them, finds those that are nearest, and shows them to the model.

Both models are the default one here, which keeps the example small. For real notes, serve an embedding model beside the
chat model and give its name as EMBEDDING_MODEL.

    pip install openai
    penstock serve
    python examples/rag.py [URL] [QUESTION]
"""

from __future__ import annotations

import sys

import numpy as np
from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
QUESTION = sys.argv[2] if len(sys.argv) > 2 else "What is the name of the cat?"
CHAT_MODEL = EMBEDDING_MODEL = "smollm2"
NOTES = (
    "The pump stands in the cellar, behind the boiler.",
    "Bread is baked at six in the morning.",
    "The cat is called Ada.",
    "Invoices are sent on the first of the month.",
    "The key of the garden gate hangs beside the door.",
)

client = OpenAI(base_url=f"{URL}/v1", api_key="none")


def embed(texts: list[str]) -> np.ndarray:
    """Returns a row of length 1 for each text."""
    answer = client.embeddings.create(model=EMBEDDING_MODEL, input=texts)
    return np.array([each.embedding for each in answer.data])


vectors = embed(list(NOTES))
vectors -= (mean := vectors.mean(axis=0))  # what all notes have in common tells none from the others
nearest = np.argsort(vectors @ (embed([QUESTION])[0] - mean))[::-1][:2]
found = "\n".join(NOTES[place] for place in nearest)
print(f"found:\n{found}\n")

prompt = f"Notes:\n{found}\n\nAnswer from the notes, in one short sentence: {QUESTION}"
answer = client.chat.completions.create(
    model=CHAT_MODEL, messages=[{"role": "user", "content": prompt}], max_tokens=40, temperature=0
)
print(answer.choices[0].message.content)
