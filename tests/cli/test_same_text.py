"""`run`, the server and `LLM` say the same."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock import LLM, SamplingParams

RECITED = "abcdefghijklménopqrstuvwxyz"
QUESTIONS = ("Why is the sky blue?", "Name three rivers.", "日本の首都は?")


@contextmanager
def served(*words: object) -> Iterator[str]:
    """The address of a server that ends with the block."""
    command = [sys.executable, "-m", "penstock", "serve", *map(str, words), "--port", "0", "--name", "it"]
    serving = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert serving.stderr
    try:
        said = serving.stderr.readline()
        address = re.search(r"http://[^ /]+", said)
        assert address, said
        wait_for(f"{address[0]}/health")
        yield address[0]
    finally:
        serving.send_signal(signal.SIGINT)
        _, logged = serving.communicate()
    assert serving.returncode == 0
    assert " info POST /v1/chat/completions status=200 seconds=" in logged
    assert RECITED not in logged


def wait_for(url: str) -> None:
    while True:
        with suppress(urllib.error.URLError), urllib.request.urlopen(url):
            return


def ask(address: str, **fields: object) -> str:
    body = json.dumps({"model": "it", "temperature": 0, **fields}).encode()
    request = urllib.request.Request(f"{address}/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        (choice,) = json.load(answer)["choices"]
    return str(choice["message"]["content"])


def test_a_tiny_model(reciter: Path, penstock: Callable[..., tuple[int, str, str]]) -> None:
    with served(reciter, "--device", "ref") as address:
        assert ask(address, messages=[{"role": "user", "content": "Go"}]) == RECITED
        code, out, _ = penstock("bench", "--url", f"{address}/v1", "--input-len", 8, "--output-len", 8, "--json")
    (result,) = json.loads(out)["results"]
    assert code == 0
    assert (result["errors"], result["output_tokens"]) == (0, 32)


def test_the_default_model(smollm2: Path, penstock: Callable[..., tuple[int, str, str]]) -> None:
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = SamplingParams(temperature=0.0, max_tokens=16)
    with LLM(smollm2, max_len=512) as llm:
        answers = [output.outputs[0].text for output in llm.chat(chats, params)]
        assert ["".join(llm.stream(chat, params)) for chat in chats] == answers
        together = llm.generate([llm._maker.text.encode_chat(chat) for chat in chats], params)
        assert [done.text for done in together] == answers
    assert "sky" in answers[0]
    with served(smollm2, "--max-len", 512) as address:
        assert [ask(address, messages=chat, max_tokens=16) for chat in chats] == answers
    for question, answer in zip(QUESTIONS, answers, strict=True):
        words = ("--max-tokens", 16, "--max-len", 512, "--temperature", 0)
        assert penstock("run", smollm2, question, *words)[1] == answer + "\n"
