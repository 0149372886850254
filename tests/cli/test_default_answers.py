"""The default model's answers to common questions are readable, with the sampling that it has by default."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from pathlib import Path

import pytest

from penstock import LLM

QUESTIONS = (
    "Why is the sky blue?",
    "What is the capital of France?",
    "How do I boil an egg?",
    "Why do leaves fall in autumn?",
    "What is photosynthesis?",
    "Give me three tips for better sleep.",
    "Explain what a computer program is.",
    "Who wrote Romeo and Juliet?",
    "How can I learn a new language?",
    "What is the difference between a cat and a dog?",
)
LONGEST = 400  # tokens
OFTEN = 8  # times that four words in a row make a loop of an answer
WORDS = 0.9  # share of the characters that are letters, blanks or common punctuation


def problems(text: str) -> list[str]:
    """What makes a text hard to read."""
    words = text.lower().split()
    found = []
    if [char for char in text if unicodedata.category(char) in ("Cc", "Cn", "Co") and char != "\n"] or "�" in text:
        found.append("characters that are no text")
    if len(words) < 4 or sum(map(len, re.findall(r"[^\W\d_]|[\s.,;:!?'\"()*-]", text))) < WORDS * len(text):
        found.append("few words")
    if max(Counter(zip(words, words[1:], words[2:], words[3:], strict=False)).values(), default=0) > OFTEN:
        found.append("a loop")
    return found


def test_common_questions_have_readable_answers(smollm2: Path) -> None:
    with LLM(smollm2, max_len=1024) as llm:
        params = [llm.sampling_params(seed=seed, max_tokens=LONGEST) for seed in range(1, len(QUESTIONS) + 1)]
        assert (params[0].temperature, params[0].top_p) == (0.7, 0.95)
        asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
        answers = llm.chat(asked, params, use_tqdm=False)
    hard = {answer.text: found for answer in answers if (found := problems(answer.text))}
    assert len(hard) <= 1, hard  # small numeric differences between machines sample other answers
    assert sum(answer.finish_reason == "stop" for answer in answers) >= 7


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The sky is blue because air scatters short waves of light.", []),
        ("Of all,\nA lover of all,\n" + "A lover of all,\n" * 9, ["a loop"]),
        ("\x07 It is blue, as everybody knows.", ["characters that are no text"]),
        ("{0x1f}[[42]]<|98|> #### 17 = 3/4", ["few words"]),
        ("", ["few words"]),
    ],
)
def test_what_is_hard_to_read_is_found(text: str, found: list[str]) -> None:
    assert problems(text) == found
