"""Client libraries, unmodified, each in an environment of its own, ask the default model."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config
from penstock.ipc.spawn import ProcessClient
from penstock.model.load import load_text
from tests.agents.conftest import RUN_SECONDS, npm_install, pip_install
from tests.server.conftest import Server, serving

pytestmark = pytest.mark.agents

INSTRUCTOR = ("instructor==1.17.0", "openai==3.3.0")
LITELLM = ("litellm==1.106.2",)
LLAMA_INDEX = (
    *("llama-index-llms-ollama==0.11.0", "llama-index-core==0.14.25", "ollama==0.6.3"),
    *("llama-index-llms-openai-like==0.8.1", "llama-index-embeddings-openai-like==0.4.0"),
)
AI_SDKS = [
    {"ai": "6.0.326", "@ai-sdk/anthropic": "3.0.138"},  # refuses `citations: null`
    {"ai": "7.0.169", "@ai-sdk/anthropic": "4.0.102", "@ai-sdk/openai-compatible": "2.0.87", "zod": "4.6.7"},
]
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "true", "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "true"}


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Server]:
    config = Config(model=str(smollm2), name="smollm2", max_len=1024, max_rows=4)
    with serving(ProcessClient(config), load_text(smollm2), "smollm2", smollm2) as server:
        yield server


def printed(command: list[str], server: Server, folder: Path) -> Any:
    """What a program that is given the server's address prints last, as JSON."""
    environment = {"HOME": str(folder), "PATH": "/usr/bin:/bin"} | OFFLINE
    done = subprocess.run(
        [*command, server.url], cwd=folder, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def run_python(python: Path, program: str, server: Server) -> Any:
    return printed([str(python), "-I", "-c", program], server, python.parent)


BY_DEFAULT = """
import json, sys
from typing import Literal
import instructor, openai, pydantic

class Person(pydantic.BaseModel):
    name: Literal["Ada", "Bob", "Cleo"]

client = instructor.from_openai(openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0))
person, answer = client.chat.completions.create_with_completion(
    model="smollm2",
    response_model=Person,
    messages=[{"role": "user", "content": "Ada, Bob and Cleo are here."}],
    temperature=0,
    max_tokens=200,
    max_retries=0,
)
print(json.dumps({"mode": client.mode.name, "person": person.model_dump(), "answer": answer.model_dump()}))
"""


def test_instructor_gets_its_model_from_one_call(server: Server, kept: Path) -> None:
    """Its default mode names the tool. The model would go on with a call for each person."""
    told = run_python(pip_install(kept / "instructor", *INSTRUCTOR), BY_DEFAULT, server)
    (choice,) = told["answer"]["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert told["mode"] == "TOOLS"
    assert call["function"]["name"] == "Person"
    assert json.loads(call["function"]["arguments"]) == told["person"]
    assert choice["message"]["content"] is None


GENERATE_TEXT = """
import { createAnthropic } from "@ai-sdk/anthropic";
import { generateText } from "ai";

const model = createAnthropic({ baseURL: process.argv[1] + "/v1", apiKey: "none" })("smollm2");
const asked = { model, prompt: "Why is the sky blue?", temperature: 0, maxOutputTokens: 60, maxRetries: 0 };
const { text, finishReason, usage } = await generateText(asked);
console.log(JSON.stringify({ text, finishReason, usage }));
"""


@pytest.mark.parametrize("versions", AI_SDKS, ids=lambda versions: versions["ai"])
def test_the_ai_sdk_reads_a_whole_message(server: Server, kept: Path, versions: dict[str, str]) -> None:
    """It checks every field of the answer."""
    folder = kept / f"ai-sdk-{versions['ai']}"
    for package, version in versions.items():
        npm_install(folder, package, version)
    node = shutil.which("node") or pytest.skip("node is not here")
    told = printed([node, "--input-type=module", "-e", GENERATE_TEXT], server, folder)
    assert "scatter" in told["text"]
    assert told["finishReason"] in ("stop", "length")
    assert told["usage"]["outputTokens"] > 0


COMPLETION = """
import json, sys
import litellm

sent = []
answer = litellm.completion(
    **json.loads(sys.argv[1]),
    api_base=sys.argv[2],
    api_key="none",
    messages=[{"role": "user", "content": "Say hello."}],
    temperature=0,
    num_retries=0,
    logger_fn=lambda call: sent.append(call["additional_args"]["complete_input_dict"]),
)
print(json.dumps({"sent": sent[0], "content": answer.choices[0].message.content}))
"""
UNIT = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}
HELD = {"type": "json_schema", "json_schema": {"name": "unit", "schema": UNIT | {"additionalProperties": False}}}


def complete(server: Server, kept: Path, **fields: Any) -> Any:
    python = pip_install(kept / "litellm", *LITELLM)
    return printed([str(python), "-I", "-c", COMPLETION, json.dumps(fields)], server, python.parent)


@pytest.mark.parametrize(("model", "field"), [("claude-sonnet-4-5", "output_format"), ("smollm2", "tool_choice")])
def test_litellm_holds_an_anthropic_answer_to_a_schema(server: Server, kept: Path, model: str, field: str) -> None:
    """For a model that it knows it sends a format, for others a tool that must be called."""
    told = complete(server, kept, model=f"anthropic/{model}", response_format=HELD, max_tokens=100)
    assert field in told["sent"]
    assert json.loads(told["content"])["unit"] in ("C", "F")


def test_litellm_asks_ollama_for_more_context_than_there_is(server: Server, kept: Path) -> None:
    told = complete(server, kept, model="ollama_chat/smollm2", num_ctx=131072, max_tokens=8)
    assert told["sent"]["options"]["num_ctx"] == 131072
    assert told["content"]


COMPLETE = """
import json, sys
import ollama
from llama_index.llms.ollama import Ollama

ignored = []
hooks = {"response": [lambda answer: ignored.append(answer.headers.get("x-penstock-ignored"))]}
client = ollama.Client(sys.argv[1], event_hooks=hooks)
options = {"temperature": 0, "additional_kwargs": {"num_predict": 60}}
llm = Ollama(model="smollm2", client=client, context_window=128000, **options)
print(json.dumps({"text": llm.complete("Why is the sky blue?").text, "ignored": ignored}))
"""


def test_llama_index_asks_ollama_for_more_context_than_there_is(server: Server, kept: Path) -> None:
    told = run_python(pip_install(kept / "llama-index", *LLAMA_INDEX), COMPLETE, server)
    assert "scatter" in told["text"]
    assert told["ignored"] == ["options.num_ctx"]
