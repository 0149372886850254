"""Implements `penstock run`, which answers one prompt."""

from __future__ import annotations

import os
import select
import shlex
import stat
import sys
from typing import TYPE_CHECKING, Annotated, Any

from penstock.cli.fitting import MemoryAdvisor, with_stored_quantize
from penstock.cli.framework import options
from penstock.cli.framework.command import Argument, Option, OptionGroup, UsageError
from penstock.cli.terminal import note, note_ending, obtain, print_json, print_piece
from penstock.errors import InvalidRequest, ModelNotFound

if TYPE_CHECKING:
    from penstock.llm import CompletionStream
    from penstock.llm.outputs import RequestOutput

PIPE_SECONDS = 3.0  # wait for input from a pipe before the prompt is answered without it


def run(
    words: Annotated[
        list[str],
        Argument(
            metavar="[MODEL] PROMPT",
            help="The model and the prompt. - reads the prompt from stdin. A model without a prompt starts a "
            "conversation or, if stdin is not a terminal, reads the prompt from it. Piped input precedes a given "
            "prompt.",
        ),
    ],
    raw: Annotated[bool, Option(help="Continue the prompt as plain text, without the chat template.")] = False,
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
      git diff | penstock run "Describe this change in one line."
      penstock run - --system "You are terse." < question.txt
      penstock run ./base.gguf "Once upon a time" --raw --max-tokens 100

    The answer goes to stdout, everything else to stderr.
    """
    model, prompt = _split(words)
    if raw and answer.system:
        raise UsageError("--raw sends the prompt alone, so --system cannot be used with it")
    if prompt is None and sys.stdin.isatty():
        return _converse(model, answer, engine, raw or json)
    text = _read("-" if prompt is None else prompt)
    if prompt not in (None, "-") and (piped := _piped()):
        text = f"{piped}\n\n{text}"
    path = obtain(model, MemoryAdvisor(engine | {"max_rows": 1}))

    from penstock.llm import LLM

    with LLM(model, max_rows=1, **with_stored_quantize(path, engine)) as llm:
        asked = text if raw else _messages(answer.system, text)
        stream = llm.stream(asked, answer.sampling(llm), lora_request=llm.adapter_names)
        if json:
            print_json({"model": model} | _facts(stream.rest()))
        else:
            _print_stream(stream)


def _converse(model: str, answer: options.AnswerOptions, engine: dict[str, Any], one_answer: bool) -> None:
    """Starts a conversation. `one_answer`: a given option only applies to single answers."""
    from penstock.cli.chat import chat

    if one_answer:
        raise UsageError(f"--raw and --json are for one answer: give a prompt too, as `penstock run {model} PROMPT`")
    chat(model, answer=answer, engine=engine)


def _messages(system: str, text: str) -> list[dict[str, str]]:
    begin = [{"role": "system", "content": system}] if system else []
    return [*begin, {"role": "user", "content": text}]


def _facts(output: RequestOutput) -> dict[str, Any]:
    return {
        "text": output.text,
        "tokens": output.tokens,
        "finish_reason": output.finish_reason,
        "stop_reason": output.outputs[0].stop_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
    }


def _print_stream(stream: CompletionStream) -> None:
    for piece in stream:
        print_piece(piece)
    print(flush=True)
    note_ending(stream.completion)


def _split(words: list[str]) -> tuple[str, str | None]:
    """Splits the words into model and prompt; None if only a model is named."""
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
    text = _decoded(sys.stdin.buffer.read() if prompt == "-" else prompt.encode(errors="surrogateescape"))
    if not text.strip():
        raise InvalidRequest("the prompt is empty: give some text", param="prompt")
    return text


def _piped() -> str:
    """Returns the contents of a pipe or file on stdin, to extend a given prompt. A partly read file belongs to a script
    or a loop. An idle open pipe is ignored after a timeout, because the parent process may have left it open.
    """
    try:
        stdin = sys.stdin.fileno()
        mode = os.fstat(stdin).st_mode
    except (OSError, ValueError, AttributeError):  # no stdin
        return ""
    if stat.S_ISREG(mode):
        fresh = os.lseek(stdin, 0, os.SEEK_CUR) == 0
    elif fresh := stat.S_ISFIFO(mode):
        fresh = bool(select.select([stdin], [], [], PIPE_SECONDS)[0])
        if not fresh:
            note(f"stdin is a pipe that had nothing for {PIPE_SECONDS:g} s: it is not read")
    return _decoded(sys.stdin.buffer.read()).strip() if fresh else ""


def _decoded(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeError as error:
        raise InvalidRequest(f"the prompt is not valid UTF-8: {error}", param="prompt") from error
