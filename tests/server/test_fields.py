"""Every field that clients are known to send, one by one: honoured, taken because it asks for nothing, ignored and
listed, or refused by name. What each is honoured by is tested beside its part; here is that none is missing and none
is dropped silently."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server import toys

MODEL = "toy/parrot"
HONOURED = "honoured"
NO_EFFECT = "no_effect"  # changes no answer
IGNORED = "ignored"  # and listed in the answer; refused by a strict server
IGNORED_CODES = ("unsupported_parameter", "unknown_parameter", "invalid_value")
SAID = [{"role": "user", "content": "[hi]"}]
PREDICTED = {"type": "content", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
UNSUPPORTED = "unsupported_parameter"
UNABLE = "invalid_grammar"  # what a toy says that has no grammars: the field was read

Row = tuple[str, Any, str]

SPECULATION: list[Row] = [
    *(("speculation", value, HONOURED) for value in ("auto", "off", 0, 4)),
    ("speculation", "eagerly", IGNORED),
]
OPENAI: list[Row] = [
    ("n", 2, HONOURED),
    ("stop", ["x"], HONOURED),
    ("seed", 1, HONOURED),
    ("temperature", 0.5, HONOURED),
    ("top_p", 0.5, HONOURED),
    ("presence_penalty", 0.5, HONOURED),
    ("frequency_penalty", 0.5, HONOURED),
    ("logit_bias", {"65": 1}, HONOURED),
    ("max_tokens", 5, HONOURED),
    ("stream", True, HONOURED),
    ("service_tier", "auto", HONOURED),
    ("service_tier", "default", HONOURED),
    ("service_tier", "flex", HONOURED),
    ("service_tier", "scale", HONOURED),
    ("service_tier", "priority", HONOURED),
    ("service_tier", "fast", HONOURED),
    ("service_tier", "gold", IGNORED),
    ("prompt_cache_key", "k", NO_EFFECT),
    ("prompt_cache_retention", "24h", NO_EFFECT),
    ("prompt_cache_options", {"mode": "explicit"}, NO_EFFECT),
    ("safety_identifier", "s", NO_EFFECT),
    ("user", "u", NO_EFFECT),
    ("top_k", 5, HONOURED),
    ("min_p", 0.1, HONOURED),
    ("repetition_penalty", 1.1, HONOURED),
    ("min_tokens", 1, HONOURED),
    ("ignore_eos", False, HONOURED),
    ("loop_guard", False, HONOURED),
    ("stop_token_ids", [65], HONOURED),
    ("logit_bias", {"a": -100}, HONOURED),
    ("logit_bias", [[65, 1.5], ["ab", False]], HONOURED),
    ("logit_bias", [[65, True]], "invalid_request"),
    ("logit_bias", [[300, 1]], "invalid_request"),
    ("bad_words", ["x"], HONOURED),
    ("bad_words", [""], "invalid_request"),
    ("allowed_token_ids", [65], HONOURED),
    ("allowed_token_ids", [], "invalid_request"),
    ("allowed_token_ids", [300], "invalid_request"),
    ("include_stop_str_in_output", True, HONOURED),
    ("repeat_penalty", 1.1, HONOURED),
    ("repeat_penalty", 0, "invalid_request"),
    ("repeat_last_n", 64, HONOURED),
    ("repeat_last_n", -2, "invalid_request"),
    ("typical_p", 0.9, HONOURED),
    ("typical_p", 1.5, "invalid_request"),
    ("top_n_sigma", 1.0, HONOURED),
    ("top_n_sigma", -5, HONOURED),  # off
    ("xtc_probability", 0.5, HONOURED),
    ("xtc_probability", 2, "invalid_request"),
    ("xtc_threshold", 0.2, HONOURED),
    ("dynatemp_range", 0.5, HONOURED),
    ("dynatemp_range", -1, "invalid_request"),
    ("dynatemp_exponent", 2.0, HONOURED),
    ("mirostat", 2, HONOURED),
    ("mirostat", 3, "invalid_request"),
    ("mirostat_tau", 3.0, HONOURED),
    ("mirostat_eta", 0.2, HONOURED),
    ("dry_multiplier", 0.8, HONOURED),
    ("dry_multiplier", -1, "invalid_request"),
    ("dry_base", 1.75, HONOURED),
    ("dry_allowed_length", 3, HONOURED),
    ("dry_penalty_last_n", 64, HONOURED),
    ("dry_sequence_breakers", ["."], HONOURED),
    ("min_keep", 2, HONOURED),
    ("samplers", ["top_k", "temperature"], HONOURED),
    ("samplers", "edkypmxt", HONOURED),
    ("samplers", ["magic"], "invalid_request"),
    ("skip_special_tokens", True, HONOURED),
    ("skip_special_tokens", False, HONOURED),
    ("response_format", {"type": "text"}, HONOURED),
    ("response_format", {"type": "json_object"}, UNABLE),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": True}}, UNABLE),
    ("structured_outputs", {"json": {}}, UNABLE),
    ("structured_outputs", {"regex": "a"}, UNABLE),
    ("structured_outputs", {"choice": ["a"]}, UNABLE),
    ("structured_outputs", {"grammar": 'start: "a"'}, UNABLE),
    ("guided_json", {}, UNABLE),
    ("guided_regex", "a", UNABLE),
    ("guided_choice", ["a"], UNABLE),
    ("guided_grammar", 'start: "a"', UNABLE),
    ("cache_salt", "s", HONOURED),
    ("cache_salt", "", "invalid_type"),
    ("priority", -3, HONOURED),
    ("priority", 2**40, "invalid_type"),
    ("deadline_ms", 60000, HONOURED),
    ("deadline_ms", 0, "invalid_request"),
    ("ttft_target_ms", 60000, HONOURED),
    ("itl_target_ms", 50, HONOURED),
    ("itl_target_ms", "fast", "invalid_type"),
    ("return_token_ids", True, HONOURED),
    ("adapters", [], HONOURED),
    ("adapters", [{"scale": 1}], "missing_required_parameter"),
    ("lora", [], HONOURED),
    ("truncate_prompt_tokens", 4, HONOURED),
    ("truncate_prompt_tokens", 0, "invalid_request"),
    ("penstock", True, HONOURED),
    *SPECULATION,
    ("speculation", -1, "invalid_type"),
    ("speculation", True, "invalid_type"),
    ("speculative.n_max", 4, HONOURED),
    ("speculative.n_max", -1, "invalid_type"),
    ("speculative.n_min", 0, NO_EFFECT),
    ("speculative.n_min", 4, IGNORED),
    ("speculative.p_min", 0.5, IGNORED),
    ("no_such_field", 1, IGNORED),
]
CHAT: list[Row] = [
    *OPENAI,
    ("metadata", {"a": "b"}, HONOURED),
    ("store", False, HONOURED),
    ("store", True, HONOURED),
    ("max_completion_tokens", 5, HONOURED),
    ("logprobs", True, HONOURED),
    ("tools", [TOOL], HONOURED),
    ("tools", [{"type": "function", "function": TOOL["function"] | {"strict": True}}], UNABLE),
    ("tools", [{"type": "custom", "custom": {"name": "x"}}], IGNORED),
    ("enable_thinking", False, HONOURED),
    ("enable_thinking", True, IGNORED),  # by a model that does not think
    ("thinking_budget", 5, IGNORED),
    ("thinking_budget", 0, "invalid_type"),
    ("thinking", {"type": "disabled"}, HONOURED),
    ("thinking", {"type": "enabled"}, IGNORED),
    ("reasoning", {"enabled": False}, HONOURED),
    ("reasoning", {"effort": "high"}, IGNORED),
    ("model", None, HONOURED),
    ("tool_choice", "none", HONOURED),
    ("tool_choice", "auto", HONOURED),
    ("tool_choice", "required", "invalid_request"),  # without tools
    ("parallel_tool_calls", False, HONOURED),
    ("reasoning_effort", "none", HONOURED),
    ("reasoning_effort", "high", IGNORED),  # by a template that knows no efforts
    ("verbosity", "medium", NO_EFFECT),
    ("verbosity", "low", IGNORED),
    ("prediction", PREDICTED, HONOURED),
    ("prediction", PREDICTED | {"content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}, HONOURED),
    ("prediction", {"type": "content", "content": 5}, "invalid_type"),
    ("prediction", {"type": "content", "content": [{"type": "image", "text": "x"}]}, "invalid_value"),
    ("prediction", {"type": "guess", "content": "hi"}, "invalid_value"),
    ("prediction", {"type": "content"}, "missing_required_parameter"),
    ("prediction", "hi", "invalid_type"),
    ("modalities", ["text"], NO_EFFECT),
    ("modalities", ["text", "audio"], IGNORED),
    ("audio", {"voice": "alloy", "format": "wav"}, IGNORED),
    ("web_search_options", {}, IGNORED),
    ("functions", [{"name": "f"}], IGNORED),
    ("function_call", "auto", NO_EFFECT),
    ("chat_template_kwargs", {}, HONOURED),
    ("chat_template_kwargs", {"mood": 1}, IGNORED),
    ("messages", [{"role": "developer", "content": "x"}, *SAID], HONOURED),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": "[hi]"}]}], HONOURED),
    ("messages", [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, *SAID], HONOURED),
    ("messages", [{"role": "assistant", "refusal": "no"}, *SAID], HONOURED),
    ("messages", [{"role": "user", "content": [IMAGE]}], UNSUPPORTED),
    ("messages", [*SAID, {"role": "tool", "tool_call_id": "c", "content": [IMAGE]}], IGNORED),
    ("messages", [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], UNSUPPORTED),
    ("messages", [{"role": "user", "content": [{"type": "file", "file": {}}]}], UNSUPPORTED),
]
COMPLETIONS: list[Row] = [
    *OPENAI,
    ("metadata", {"a": "b"}, NO_EFFECT),
    ("store", False, NO_EFFECT),
    ("store", True, IGNORED),
    ("prompt", ["[a]", "[b]"], HONOURED),
    ("prompt", [91, 97, 93], HONOURED),
    ("prompt", [[91, 97, 93]], HONOURED),
    ("echo", True, HONOURED),
    ("logprobs", 2, HONOURED),
    ("best_of", 3, HONOURED),
    ("suffix", "", NO_EFFECT),
    ("suffix", "end", UNSUPPORTED),
]
FAILS = "invalid_request_error"
BLOCK = {"type": "text", "text": "[hi]", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
CUSTOM = {"name": "f", "input_schema": {"type": "object"}}
ANTHROPIC: list[Row] = [
    ("system", "s", HONOURED),
    ("system", [BLOCK], HONOURED),
    ("messages", [{"role": "user", "content": [BLOCK]}], HONOURED),
    ("messages", [{"role": "system", "content": "s"}, *SAID], HONOURED),
    ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}], FAILS),
    ("messages", [{"role": "user", "content": [{"type": "document", "source": {}}]}], FAILS),
    ("tools", [CUSTOM], HONOURED),
    ("tools", [CUSTOM | {"strict": True}], FAILS),  # the toy has no grammars
    ("tool_choice", {"type": "auto", "disable_parallel_tool_use": True}, HONOURED),
    ("tool_choice", {"type": "none"}, HONOURED),
    ("tool_choice", {"type": "any"}, FAILS),  # without tools
    ("thinking", {"type": "disabled"}, HONOURED),
    ("thinking", {"type": "enabled", "budget_tokens": 1024}, IGNORED),  # the toy does not think
    ("thinking", {"type": "adaptive"}, IGNORED),
    ("thinking", {"type": "between_tools"}, IGNORED),
    ("stop_sequences", ["x"], HONOURED),
    ("stream", True, HONOURED),
    ("temperature", 0.5, HONOURED),
    ("top_p", 0.5, HONOURED),
    ("top_k", 5, HONOURED),
    ("metadata", {"user_id": "u"}, NO_EFFECT),
    ("cache_control", {"type": "ephemeral"}, NO_EFFECT),
    ("service_tier", "auto", NO_EFFECT),
    ("service_tier", "standard_only", NO_EFFECT),
    ("service_tier", "gold", IGNORED),
    ("speed", "standard", NO_EFFECT),
    ("speed", "fast", IGNORED),
    ("container", "c", IGNORED),
    ("mcp_servers", [{"type": "url"}], IGNORED),
    ("output_config", {"effort": "low"}, IGNORED),
    ("output_config", {"format": {"type": "json_schema", "schema": {}}}, FAILS),
    ("penstock", True, HONOURED),
    *SPECULATION,
    ("speculation", -1, FAILS),
    ("no_such_field", 1, IGNORED),
]
OPTIONS: list[Row] = [
    ("num_ctx", 256, HONOURED),
    ("num_ctx", 10**6, IGNORED),
    ("num_predict", 5, HONOURED),
    ("seed", 1, HONOURED),
    ("temperature", 0.5, HONOURED),
    ("top_k", 5, HONOURED),
    ("top_p", 0.5, HONOURED),
    ("min_p", 0.1, HONOURED),
    ("typical_p", 0.5, HONOURED),
    ("tfs_z", 0.5, IGNORED),
    ("repeat_last_n", 64, HONOURED),
    ("repeat_last_n", -2, FAILS),
    ("repeat_penalty", 1.1, HONOURED),
    ("presence_penalty", 0.5, HONOURED),
    ("frequency_penalty", 0.5, HONOURED),
    ("stop", ["x"], HONOURED),
    ("mirostat", 1, HONOURED),
    ("mirostat_tau", 5.0, HONOURED),
    ("mirostat_eta", 0.1, HONOURED),
    *((name, 1, NO_EFFECT) for name in ("num_keep", "num_gpu", "num_thread", "num_batch", "main_gpu")),
    ("use_mmap", True, NO_EFFECT),
    ("draft_num_predict", 4, HONOURED),
    ("draft_num_predict", -1, FAILS),
    ("no_such_option", 1, IGNORED),
]
OLLAMA: list[Row] = [
    *((f"options.{name}", value, told) for name, value, told in OPTIONS),
    ("format", "", NO_EFFECT),
    ("format", "json", FAILS),  # the toy has no grammars
    ("format", {"type": "object"}, FAILS),
    ("think", False, HONOURED),
    ("think", True, IGNORED),  # the toy does not think
    ("think", "low", IGNORED),
    ("logprobs", True, HONOURED),
    ("truncate", True, NO_EFFECT),
    ("shift", True, NO_EFFECT),
    ("keep_alive", "5m", NO_EFFECT),
    ("keep_alive", -1, NO_EFFECT),
    ("penstock", True, HONOURED),
    *SPECULATION,
    ("speculation", -1, FAILS),
    ("no_such_field", 1, IGNORED),
]
OLLAMA_CHAT: list[Row] = [
    *OLLAMA,
    ("tools", [TOOL], HONOURED),
    ("messages", [SAID[0] | {"images": []}], NO_EFFECT),
    ("messages", [SAID[0] | {"images": ["aGk="]}], FAILS),
]
OLLAMA_GENERATE: list[Row] = [
    *OLLAMA,
    ("raw", True, HONOURED),
    ("system", "s", HONOURED),
    ("suffix", "", NO_EFFECT),
    ("suffix", "end", FAILS),
    ("template", "{{ .Prompt }}", HONOURED),
    ("template", "{{ call .Prompt }}", FAILS),
    ("template", "{{ range .Messages }}{{ end }}", FAILS),
    ("keep_alive", 0, NO_EFFECT),
    ("images", ["aGk="], FAILS),
    ("context", [1, 2], FAILS),
]


def ids(rows: list[Row]) -> list[str]:
    return [f"{name}-{told}" for name, _, told in rows]


def check(answer: Any, field: str, told: str) -> None:
    """What is refused says which field it is about; what is not refused is answered."""
    ignored = answer.headers.get("x-penstock-ignored", "")
    if told in (HONOURED, NO_EFFECT, IGNORED):
        assert answer.status_code == 200, answer.text
        assert (field in ignored) == (told == IGNORED), ignored
        assert (f'"ignored_fields":["{field}' in answer.text) == (told == IGNORED)
        return
    check_refused(answer, field, told)


def check_refused(answer: Any, field: str, told: str) -> None:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    if "started without a tokenizer" in message:
        return  # for a grammar that the field stands for
    assert field in message or field == error["param"].partition("[")[0]
    if told == IGNORED and "code" in error:
        assert error["code"] in IGNORED_CODES
    elif told not in (FAILS, IGNORED):
        assert error["code"] == told


def check_both(parrot: Any, strict_parrot: Any, asked: tuple[str, dict[str, Any]], field: str, told: str) -> None:
    """A strict server answers the same, but refuses what others ignore."""
    path, body = asked
    check(parrot.post(path, **body), field, told)
    (check_refused if told == IGNORED else check)(strict_parrot.post(path, **body), field, told)


@pytest.mark.parametrize(("field", "value", "told"), CHAT, ids=ids(CHAT))
def test_chat_completions(parrot: Any, strict_parrot: Any, field: str, value: Any, told: str) -> None:
    asked = {"model": MODEL, "messages": SAID, "max_tokens": None if "max" in field else 5} | {field: value}
    check_both(parrot, strict_parrot, ("/v1/chat/completions", asked), field, told)


@pytest.mark.parametrize(("field", "value", "told"), COMPLETIONS, ids=ids(COMPLETIONS))
def test_completions(parrot: Any, strict_parrot: Any, field: str, value: Any, told: str) -> None:
    asked = {"model": MODEL, "prompt": "[hi]", field: value}
    check_both(parrot, strict_parrot, ("/v1/completions", asked), field, told)


@pytest.mark.parametrize(("field", "value", "told"), ANTHROPIC, ids=ids(ANTHROPIC))
def test_messages(parrot: Any, strict_parrot: Any, field: str, value: Any, told: str) -> None:
    asked = {"model": MODEL, "messages": SAID, "max_tokens": 5} | {field: value}
    check_both(parrot, strict_parrot, ("/v1/messages", asked), field, told)


@pytest.mark.parametrize(
    ("path", "field", "value", "told"),
    [("/api/chat", *row) for row in OLLAMA_CHAT] + [("/api/generate", *row) for row in OLLAMA_GENERATE],
    ids=ids(OLLAMA_CHAT) + ids(OLLAMA_GENERATE),
)
def test_ollama(parrot: Any, strict_parrot: Any, path: str, field: str, value: Any, told: str) -> None:
    outer, _, option = field.partition(".")
    asked = {"model": MODEL, "messages": SAID} if path == "/api/chat" else {"model": MODEL, "prompt": "[hi]"}
    asked |= {outer: {option: value} if option else value, "stream": False}
    check_both(parrot, strict_parrot, (path, asked), outer, told)


# -- what the newer ones do ---------------------------------------------------------------------------------------


def complete(server: Any, prompt: Any, **fields: Any) -> Any:
    answer = server.post("/v1/completions", model=MODEL, prompt=prompt, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_salt_keeps_prompts_apart(parrot: Any) -> None:
    def cached(salt: str | None) -> int:
        told = complete(parrot, "[x] a prompt of more than two blocks of sixteen", cache_salt=salt)
        return told["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(salt) for salt in (None, "a", "b", None, "a", "b")] == [0, 0, 0, 32, 32, 32]


def test_tiers_and_priorities_are_the_order_of_those_that_wait(parrot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    run = parrot.client.run

    def watch(request: Any, read: Any) -> Any:
        seen.append(request.priority)
        return run(request, read)

    monkeypatch.setattr(parrot.client, "run", watch)
    tiers = [complete(parrot, "[x]", service_tier=tier)["service_tier"] for tier in ("auto", "flex", "fast", "scale")]
    assert tiers == ["default", "flex", "priority", "default"]
    assert "service_tier" not in complete(parrot, "[x]", priority=7)
    complete(parrot, "[x]", priority=-2, service_tier="flex")
    assert seen == [0, 1, -1, 0, 7, -2]


def test_token_ids(parrot: Any) -> None:
    answer = [*b"hi", toys.END]
    asked = {"model": MODEL, "messages": SAID, "return_token_ids": True}
    whole = parrot.post("/v1/chat/completions", **asked).json()
    prompt = list(b"user:[hi]\nassistant:")
    assert (whole["prompt_token_ids"], whole["choices"][0]["token_ids"]) == (prompt, answer)
    for scored in ({}, {"logprobs": True}):
        first, *chunks = parrot.sdk().chat.completions.create(
            model=MODEL, messages=SAID, stream=True, extra_body={"return_token_ids": True}, **scored
        )
        assert first.prompt_token_ids == prompt
        assert not any(hasattr(chunk, "prompt_token_ids") for chunk in chunks)
        assert [id for chunk in chunks for id in getattr(chunk.choices[0], "token_ids", ())] == answer
    (choice,) = complete(parrot, "[hi]", return_token_ids=True)["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (list(b"[hi]"), answer)
    first, *chunks = parrot.sdk().completions.create(
        model=MODEL, prompt="[hi]", stream=True, extra_body={"return_token_ids": True}
    )
    assert first.choices[0].prompt_token_ids == list(b"[hi]")
    assert not any(hasattr(chunk.choices[0], "prompt_token_ids") for chunk in chunks)
    assert [id for chunk in (first, *chunks) for id in getattr(chunk.choices[0], "token_ids", ())] == answer


def test_a_prompt_is_cut_only_on_request_and_that_is_told(parrot: Any) -> None:
    prompt = "x" * 600 + "[hi]"
    refused = parrot.post("/v1/completions", model=MODEL, prompt=prompt)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    cut = complete(parrot, prompt, truncate_prompt_tokens=10, echo=True)
    assert (cut["choices"][0]["text"], cut["usage"]["prompt_tokens"]) == ("xxxxxx[hi]hi", 10)
    assert cut["penstock"] == {"ignored_fields": [], "truncated_tokens": 594}
    most = complete(parrot, prompt, truncate_prompt_tokens=-1, max_tokens=12)
    assert (most["usage"]["prompt_tokens"], most["penstock"]["truncated_tokens"]) == (500, 104)
    assert "penstock" not in complete(parrot, "[hi]", truncate_prompt_tokens=10)
    asked = {"model": MODEL, "messages": SAID, "max_tokens": 3, "truncate_prompt_tokens": 12}
    assert parrot.post("/v1/chat/completions", **asked).json()["penstock"]["truncated_tokens"] == 8
    told = parrot.post("/v1/completions", model=MODEL, prompt=prompt, truncate_prompt_tokens=510).json()["error"]
    assert (told["param"], "from 1 to 496" in told["message"]) == ("truncate_prompt_tokens", True)


def test_special_tokens_are_told_where_they_are_not_skipped(parrot: Any) -> None:
    asked = {"prompt": "[hi]", "max_tokens": 4, "ignore_eos": True}
    assert complete(parrot, **asked)["choices"][0]["text"] == "hi"
    assert complete(parrot, **asked, skip_special_tokens=False)["choices"][0]["text"] == "hi<end><end>"


def test_a_choice_among_tools(parrot: Any) -> None:
    asked = {"model": MODEL, "messages": SAID, "tools": [TOOL], "tool_choice": ALLOWED, "max_tokens": 5}
    assert parrot.post("/v1/chat/completions", **asked).status_code == 200
