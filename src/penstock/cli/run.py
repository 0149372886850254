"""`penstock run` answers one prompt."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

from penstock.cli import options
from penstock.cli.command import Argument, Option, OptionGroup, UsageError
from penstock.cli.terminal import note, obtain, print_json
from penstock.errors import InvalidRequest, ModelNotFound

if TYPE_CHECKING:
    from penstock.llm import CompletionStream
    from penstock.llm.outputs import RequestOutput


def run(
    words: Annotated[
        list[str],
        Argument(
            metavar="[MODEL] PROMPT",
            help="The model and the prompt. - reads the prompt from stdin. A model alone starts a conversation, or "
            "reads the prompt from stdin if that is not a terminal.",
        ),
    ],
    raw: Annotated[bool, Option(help="Continue the prompt as a text, without the chat template.")] = False,
    json: options.Json = False,
    *,
    answer: Annotated[options.AnswerOptions, OptionGroup()],
    engine: options.OneSequenceSettings,
) -> None:
    """Answer one prompt and print the answer.

      penstock run "Why is the sky blue?"
      penstock run llama3.2:1b
      penstock run smollm2 "Name three rivers." --max-tokens 60
      penstock run ./model.gguf "Write a haiku." --temperature 0.8 --seed 1
      git diff | penstock run - --system "Describe this change in one line."
      penstock run ./base.gguf "Once upon a time" --raw --max-tokens 100

    The answer goes to stdout, everything else to stderr.
    """
    model, prompt = _split(words)
    if raw and answer.system:
        raise UsageError("--raw sends the prompt alone, so --system cannot be used with it")
    if prompt is None and sys.stdin.isatty():
        return _converse(model, answer, engine, raw or json)
    text = _read("-" if prompt is None else prompt)
    obtain(model)

    from penstock.llm import LLM

    with LLM(model, max_rows=1, **engine) as llm:
        asked = text if raw else _messages(answer.system, text)
        stream = llm.stream(asked, answer.sampling(llm), lora_request=llm.adapter_names)
        if json:
            print_json({"model": model} | _facts(stream.rest()))
        else:
            _print_stream(stream)


def _converse(model: str, answer: options.AnswerOptions, engine: dict[str, Any], one_answer: bool) -> None:
    """Starts a conversation. `one_answer`: an option was given that is for one answer only."""
    from penstock.cli.chat import chat

    if one_answer:
        raise UsageError(f"--raw and --json are for one answer: give a prompt too, as `penstock run {model} PROMPT`")
    chat(model, answer=answer, engine=engine)


def _messages(system: str, text: str) -> list[dict[str, str]]:
    begin = [{"role": "system", "content": system}] if system else []
    return [*begin, {"role": "user", "content": text}]


def _facts(output: RequestOutput) -> dict[str, Any]:
    """Returns what --json prints about an answer."""
    return {
        "text": output.text,
        "tokens": output.tokens,
        "finish_reason": output.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
    }


def _print_stream(stream: CompletionStream) -> None:
    for piece in stream:
        sys.stdout.write(piece)
        sys.stdout.flush()
    print(flush=True)
    if stream.completion.finish_reason == "length":
        note(f"(the answer was cut off after {len(stream.completion.tokens)} tokens)")


def _split(words: list[str]) -> tuple[str, str | None]:
    """Returns the model and the prompt; None if only a model is named."""
    if len(words) > 2:
        raise UsageError(f"takes a model and a prompt; got {len(words)} words: put the prompt in quotes")
    if len(words) == 2:
        return words[0], words[1]
    from penstock.store import find, looks_like_model, stored_names

    (word,) = words
    if not looks_like_model(word):
        return options.DEFAULT_MODEL, word
    try:
        find(word)
    except ModelNotFound as error:
        stored = ", ".join(stored_names()) or "none"
        as_prompt = f"if it is a prompt: penstock run {options.DEFAULT_MODEL} {shlex.quote(word)}"
        raise ModelNotFound(f"{error}. Models stored here: {stored}; {as_prompt}") from None
    return word, None


def _read(prompt: str) -> str:
    """Returns the prompt's text, from stdin if it is -."""
    try:
        text = sys.stdin.buffer.read().decode() if prompt == "-" else prompt.encode().decode()
    except UnicodeError as error:
        raise InvalidRequest(f"the prompt is not valid UTF-8: {error}", param="prompt") from error
    if not text.strip():
        raise InvalidRequest("the prompt is empty: give some text", param="prompt")
    return text
