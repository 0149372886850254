"""Templates in Ollama's notation."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ContextTooLong, InvalidRequest
from penstock.text.ollama_template import MAX_ACTIONS, OllamaTemplate

CHATML = """{{- if .System }}<s>{{ .System }}</s>
{{ end }}{{ if .Prompt }}<u>{{ .Prompt }}</u>
{{ end }}<a>{{ .Response }}</a>
"""
WORDS = {"s": "system", "u": "user", "a": "assistant"}


def chat(*turns: str) -> list[dict[str, str]]:
    """`u:Hello` is what a user says."""
    return [{"role": WORDS[turn[0]], "content": turn[2:]} for turn in turns]


@pytest.mark.parametrize(
    ("messages", "rendered"),
    [
        (chat("u:Hi"), "<u>Hi</u>\n<a>"),
        (chat("s:Be", "u:Hi"), "<s>Be</s>\n<u>Hi</u>\n<a>"),
        (chat("u:1", "a:2", "u:3"), "<u>1</u>\n<a>2</a>\n<u>3</u>\n<a>"),
        (chat("s:Be", "u:1", "a:2", "s:Now", "u:3"), "<s>Be</s>\n<u>1</u>\n<a>2</a>\n<s>Now</s>\n<u>3</u>\n<a>"),
        (chat("u:1", "u:2"), "<u>1\n\n2</u>\n<a>"),
        (chat("u:1", "a:2"), "<u>1</u>\n<a>2</a>\n<a>"),
        (chat("u:1", "s:Late"), "<u>1</u>\n<a></a>\n<s>Late</s>\n<a>"),
    ],
)
def test_a_chat_is_its_turns(messages: list[dict[str, str]], rendered: str) -> None:
    assert OllamaTemplate(CHATML).render(messages) == rendered


def test_without_a_place_to_answer() -> None:
    template = OllamaTemplate("[{{ .Prompt }}]")
    assert template.render(chat("u:1", "a:2", "u:3")) == "[1]2[3]"
    assert template.render(chat("u:1", "a:2"), add_generation_prompt=False) == "[1]2"


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        ("{{ .Prompt }}", "Hi"),
        ("a {{- .Prompt }} b", "aHi b"),
        ("a {{- /* said */ -}} b{{ .Prompt }}", "abHi"),
        ("{{ if .System }}x{{ else }}y{{ end }}{{ .Prompt }}", "yHi"),
        ("{{ if .System }}x{{ else if .Prompt }}z{{ else }}y{{ end }}{{ .Prompt }}", "zHi"),
        ("{{ if or .System .Prompt }}x{{ end }}{{ if and .System .Prompt }}y{{ end }}{{ .Prompt }}", "xHi"),
        ("{{ if not .System }}x{{ if .Prompt }}{{ .Prompt }}{{ end }}{{ end }}", "xHi"),
        ("{{ .Prompt }}{{ if .Prompt }}>{{ .Response }}|{{ end }}.", "Hi>"),
    ],
)
def test_actions(source: str, rendered: str) -> None:
    assert OllamaTemplate(source).render(chat("u:Hi")) == rendered


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("plain", "no place for the user's message"),
        ("{{ .Prompt }}{{ if .System }}", "has no {{ end }}"),
        ("{{ .Prompt }}{{ end }}", "{{ end }} is not supported"),
        ("{{ .Prompt }}{{ if .System }}{{ else }}{{ else }}{{ end }}", "{{ else }} is not supported"),
        ("{{ range .Messages }}{{ .Content }}{{ end }}", "{{ range .Messages }} is not supported"),
        ("{{ .Prompt }}{{ if eq .Prompt 1 }}{{ end }}", "is not supported"),
        ("{{ .Prompt }}{{ if not .Prompt .System }}{{ end }}", "is not supported"),
        ("{{ .Prompt }}" * (MAX_ACTIONS + 1), "the limit is 64"),
        ("{{ .Prompt }}" + "x" * 2**16, "the limit is 65536"),
    ],
)
def test_what_is_not_understood_is_refused(source: str, told: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        OllamaTemplate(source)
    assert told in caught.value.message
    assert caught.value.param == "template"


def test_nothing_is_dropped_in_silence() -> None:
    with pytest.raises(InvalidRequest, match="does not support a system message"):
        OllamaTemplate("{{ .Prompt }}").render(chat("s:Be", "u:Hi"))


def test_long_chats_are_refused() -> None:
    with pytest.raises(ContextTooLong):
        OllamaTemplate("x" * 60_000 + "{{ .Prompt }}").render(chat(*["u:1", "a:2"] * 100))


def test_tools_are_told_in_words() -> None:
    tool = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
    told = OllamaTemplate(CHATML).render(chat("u:Hi"), tools=[tool])
    assert '"look"' in told
    assert told.endswith("Hi</u>\n<a>")


@given(st.text(alphabet="{}-.% /*\nifelsndSPR", max_size=60))
def test_any_text_is_read_or_refused(source: str) -> None:
    with suppress(InvalidRequest):
        OllamaTemplate(source)
