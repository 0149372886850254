"""The sampler fields of llama.cpp and vLLM become sampling parameters; what those do is tested in tests/engine."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.types import BANNED, DryPenalty, Request, SamplerChain
from tests.server import toys

MODEL = "toy/parrot"
USUAL = SamplerChain()
ORDER = USUAL.order


@pytest.fixture
def submitted(parrot: Any, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    seen: list[Request] = []
    run = parrot.client.run

    def watch(request: Request, read: Any) -> Any:
        seen.append(request)
        return run(request, read)

    monkeypatch.setattr(parrot.client, "run", watch)
    return seen


def complete(server: Any, **fields: Any) -> dict[str, Any]:
    answer = server.post("/v1/completions", **{"model": MODEL, "prompt": "[hi]"} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({"typical_p": 0.9}, {"chain": USUAL._replace(typical_p=0.9)}),
        ({"top_n_sigma": 1.5}, {"chain": USUAL._replace(top_n_sigma=1.5)}),
        (
            {"xtc_probability": 0.5, "xtc_threshold": 0.2},
            {"chain": USUAL._replace(xtc_probability=0.5, xtc_threshold=0.2)},
        ),
        (
            {"dynatemp_range": 0.5, "dynatemp_exponent": 2},
            {"chain": USUAL._replace(dynatemp_range=0.5, dynatemp_exponent=2.0)},
        ),
        (
            {"mirostat": 1, "mirostat_tau": 3, "mirostat_eta": 0.2},
            {"chain": USUAL._replace(mirostat=1, mirostat_tau=3.0, mirostat_eta=0.2)},
        ),
        ({"min_keep": 2}, {"chain": USUAL._replace(min_keep=2)}),
        (
            {"samplers": ["top_k", "typ_p", "temp"]},
            {"chain": USUAL._replace(order=("top_k", "typical_p", "temperature"))},
        ),
        ({"samplers": "kyt"}, {"chain": USUAL._replace(order=("top_k", "typical_p", "temperature"))}),
        ({"samplers": "edskypmxt"}, {"chain": USUAL}),
        ({"samplers": "top_k;min-p"}, {"chain": USUAL._replace(order=("top_k", "min_p"))}),
        ({"samplers": []}, {"chain": USUAL._replace(order=())}),
        ({"top_n_sigma": -1, "typical_p": 1, "xtc_probability": 0, "mirostat": 0, "min_keep": 0}, {"chain": None}),
        ({"xtc_threshold": 0.3, "mirostat_tau": 3, "dynatemp_exponent": 2}, {"chain": None}),
        ({"dry_multiplier": 0.8}, {"dry": DryPenalty(0.8), "chain": None}),
        (
            {
                "dry_multiplier": 0.8,
                "dry_base": 2,
                "dry_allowed_length": 3,
                "dry_penalty_last_n": 64,
                "dry_sequence_breakers": ["."],
            },
            {"dry": DryPenalty(0.8, 2.0, 3, 64, (".",))},
        ),
        ({"dry_base": 2, "dry_multiplier": 0}, {"dry": None}),
        ({"dry_multiplier": 0.8, "samplers": "ekt"}, {"dry": None}),
        ({"repeat_penalty": 1.2, "repeat_last_n": 32}, {"repetition_penalty": 1.2, "penalty_window": 32}),
        ({"repeat_penalty": 1.2, "repetition_penalty": 1.2}, {"repetition_penalty": 1.2, "penalty_window": -1}),
        (
            {"repeat_penalty": 1.2, "presence_penalty": 1, "samplers": ["top_k"]},
            {"repetition_penalty": 1.0, "presence_penalty": 0.0},
        ),
        ({"logit_bias": {"65": 1}}, {"logit_bias": {65: 1.0}}),
        ({"logit_bias": {"ab": -2, "99": False}}, {"logit_bias": {97: -2.0, 98: -2.0, 99: BANNED}}),
        ({"logit_bias": [[65, 1], ["ab", False]]}, {"logit_bias": {65: 1.0, 97: BANNED, 98: BANNED}}),
        ({"bad_words": ["no"]}, {"bad_words": ("no",)}),
        ({"allowed_token_ids": [1, 2]}, {"allowed_token_ids": (1, 2)}),
        ({"include_stop_str_in_output": True}, {"include_stop_str_in_output": True}),
    ],
)
def test_fields_become_settings(
    parrot: Any, submitted: list[Request], fields: dict[str, Any], settings: dict[str, Any]
) -> None:
    complete(parrot, **fields)
    sampling = submitted[0].sampling
    assert {name: getattr(sampling, name) for name in settings} == settings


def test_texts_reach_the_engine_as_tokens(parrot: Any, submitted: list[Request]) -> None:
    complete(parrot, bad_words=["no", " way"], dry_multiplier=1, dry_sequence_breakers=["a", "bc"])
    assert submitted[0].bad_words == ((110, 111), (119, 97, 121))
    assert submitted[0].dry_breakers == ((97,), (98, 99))


def test_two_names_of_one_penalty_must_agree(parrot: Any) -> None:
    answer = parrot.post("/v1/completions", model=MODEL, prompt="[hi]", repeat_penalty=1.2, repetition_penalty=1.1)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "repeat_penalty")


def test_a_stop_string_is_told_where_it_is_wanted(parrot: Any) -> None:
    asked = {"prompt": "[one, two]", "stop": [", t"]}
    assert complete(parrot, **asked)["text"] == "one"
    assert complete(parrot, **asked, include_stop_str_in_output=True)["text"] == "one, t"
    for included, text in ((False, "one"), (True, "one, t")):
        chunks = parrot.sdk().completions.create(
            model=MODEL, **asked, stream=True, extra_body={"include_stop_str_in_output": included}
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == text


def test_a_stop_token_is_told_where_it_is_wanted_and_visible(parrot: Any) -> None:
    asked = {"prompt": "[one, two]", "stop_token_ids": [ord(",")]}
    assert complete(parrot, **asked)["text"] == "one"
    assert complete(parrot, **asked, include_stop_str_in_output=True)["text"] == "one,"
    assert complete(parrot, prompt="[one]", include_stop_str_in_output=True)["text"] == "one"
    visible = complete(parrot, prompt="[one]", include_stop_str_in_output=True, skip_special_tokens=False)
    assert visible["text"] == "one" + toys.ToyTokenizer().token_text(toys.END)


def test_a_chat_includes_its_stop_string(parrot: Any) -> None:
    messages = [{"role": "user", "content": "[one, two]"}]
    asked = {"model": MODEL, "messages": messages, "stop": ", t", "include_stop_str_in_output": True}
    assert parrot.post("/v1/chat/completions", **asked).json()["choices"][0]["message"]["content"] == "one, t"
