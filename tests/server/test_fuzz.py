"""A fuzzer reads /openapi.json and asks for all of it: what the document allows, what it does not, and much that
reaches the engine. No answer is a 5xx or late, each is what the document says, what the document does not allow is
refused, and nothing is left behind.

PENSTOCK_FUZZ=200 asks for 200 random examples of every route, of the toy and of the default model.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config
from penstock.ipc.inprocess import InProcessClient
from penstock.ipc.spawn import ProcessClient
from penstock.model.load import load_text
from penstock.server.access.guard import Rules
from tests.server import toys

EXAMPLES = int(os.environ.get("PENSTOCK_FUZZ", "0"))  # of every route; 0: as many as a usual run has time for
WAIT = 120  # seconds for an answer
STRICT = Rules(lenient=False)  # so that it can be seen whether the document names every field

CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")

SHARED = r"/v1/messages/count_tokens|/v1/responses/input_tokens|/v2/models/.*/generate.*"  # whose fields others have

# After these nothing would be answered; the last one needs no body, though it reads one.
PAUSING = ("/pause", "/pause_generation", "/update_weights_from_disk", "/continue_generation")

SHORT = {"type": "string", "maxLength": 8}
SPOKEN = {"anyOf": [{"enum": ["[hello]", "[*ab]", "[]", "[=f09f9880]", "hi"]}, {"type": "string", "minLength": 1}]}
MESSAGE = {
    "type": "object",
    "properties": {"role": {"enum": ["user"]}, "content": SPOKEN},
    "required": ["role", "content"],
    "additionalProperties": False,
}


def between(least: float, most: float, kind: str = "number") -> dict[str, Any]:
    return {"type": kind, "minimum": least, "maximum": most}


# What a request may have in it and still be answered. Fields of other names are left out.
ANSWERABLE: dict[str, dict[str, Any]] = {
    "prompt": SPOKEN,
    "content": SPOKEN,
    "input": SPOKEN,
    "messages": {"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": 3},
    "tokens": {"type": "array", "items": between(0, 200, "integer"), "maxItems": 8},
    "system": SHORT,
    "stream": {"type": "boolean"},
    "n": between(1, 3, "integer"),
    "max_tokens": between(1, 8, "integer"),
    "max_output_tokens": between(1, 8, "integer"),
    "background": {"type": "boolean"},
    "min_tokens": between(0, 2, "integer"),
    "temperature": between(0, 2),
    "top_p": between(0.01, 1),
    "top_k": between(0, 99, "integer"),
    "min_p": between(0, 1),
    "presence_penalty": between(-2, 2),
    "frequency_penalty": between(-2, 2),
    "repetition_penalty": between(0.5, 2),
    "repeat_penalty": between(0.5, 2),
    "num_predict": between(1, 8, "integer"),
    "seed": between(-(2**63), 2**63 - 4, "integer"),
    "stop": {"type": "string", "minLength": 1, "maxLength": 3},
    "stop_sequences": {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 3},
    "stop_token_ids": {"type": "array", "items": between(0, 200, "integer"), "maxItems": 3},
    "ignore_eos": {"type": "boolean"},
    "echo": {"type": "boolean"},
    "options": {"$ref": "#/components/schemas/OllamaOptions"},
}


@contextmanager
def toy_model(serve: Callable[..., Any], _: Any) -> Iterator[Any]:
    with serve(InProcessClient(toys.open_parrot, "parrot"), toys.ToyText(), "toy/parrot", rules=STRICT) as server:
        yield server


@contextmanager
def default_model(serve: Callable[..., Any], path: Path) -> Iterator[Any]:
    client = ProcessClient(Config(model=str(path), name="smollm2", max_len=96, max_rows=8))
    with serve(client, load_text(path), "smollm2", path, rules=STRICT) as server:
        yield server


LONG = pytest.mark.skipif(not EXAMPLES, reason="takes minutes: PENSTOCK_FUZZ=200")


@pytest.fixture(scope="module", params=[toy_model, pytest.param(default_model, marks=LONG)])
def server(request: pytest.FixtureRequest, serve: Callable[..., Any], tmp_path_factory: Any) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_HOME", str(tmp_path_factory.mktemp("home")))
        model = request.getfixturevalue("smollm2") if request.param is default_model else None
        with request.param(serve, model) as server:
            yield server


def document(server: Any) -> dict[str, Any]:
    """Returns the server's description of its routes, with the one model's name, since others lead to a 404 and no
    further, and without the routes that pause the engine."""
    told = server.get("/openapi.json").json()
    for path in PAUSING:
        del told["paths"][path]
    name = server.get("/v1/models").json()["data"][0]["id"]
    for fields in requested(told):
        if "model" in fields:
            fields["model"] = {"enum": [name] if fields["model"].get("type") == "string" else [name, None]}
    return told


def requested(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The fields of every body that is read."""
    for path in document["paths"].values():
        for operation in path.values():
            body = operation.get("requestBody", {"content": {}})["content"].get("application/json")
            if body is not None and "$ref" in body["schema"]:  # others are lists
                yield document["components"]["schemas"][body["schema"]["$ref"].rpartition("/")[2]]["properties"]


def answerable(document: dict[str, Any]) -> dict[str, Any]:
    generating = ("completions", "chat", "messages", "responses", "generate", "embed", "embeddings", "tokenize")
    document["paths"] = {path: each for path, each in document["paths"].items() if path.endswith(generating)}
    for fields in (*requested(document), document["components"]["schemas"]["OllamaOptions"]["properties"]):
        kept = ANSWERABLE | {"model": fields.get("model", {})}
        for name in [*fields]:
            if name in kept:
                fields[name] = kept[name]
            else:
                del fields[name]
    return document


def each_body_once(document: dict[str, Any]) -> None:
    """Leaves out routes that read what others read: the dialects of other engines have several names for a route."""
    seen = set[str]()
    for path, operations in [*document["paths"].items()]:
        contents = [operation.get("requestBody", {}).get("content", {}) for operation in operations.values()]
        bodies = {json.dumps(content["application/json"]) for content in contents if "application/json" in content}
        if len(operations) == len(bodies) and bodies <= seen:
            del document["paths"][path]
        seen |= bodies


def fuzz(server: Any, document: dict[str, Any], folder: Path, *how: str) -> int:
    """How many requests were made."""
    (folder / "openapi.json").write_text(json.dumps(document))
    words = ["run", "openapi.json", "--url", server.url, "--seed", "1", "--request-timeout", str(WAIT)]
    words += ["--warnings", "off", "--no-shrink", "--suppress-health-check", "all", *how]
    command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", *words]
    kept = {"HYPOTHESIS_STORAGE_DIRECTORY": str(Path(".hypothesis").absolute())}  # tables that take seconds to make
    done = subprocess.run(command, cwd=folder, env=os.environ | kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    made = re.search(r"(\d+) generated", done.stdout)
    assert made, done.stdout
    return int(made[1])


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Callable[[int], None]:
    def told(made: int) -> None:
        with capsys.disabled():
            print(f" [{made} requests]", end="")

    return told


def nothing_is_left(server: Any) -> None:
    """Checks an engine that has nothing to do. A keep_alive of 0 may have unloaded the model."""
    server.until_idle()
    assert server.http.post("/wake_up").status_code == 200
    stats = server.client.stats
    assert stats.blocks_used == 0
    assert stats.blocks_free + stats.blocks_cached == server.client.hello.limits.num_blocks
    assert server.client.restarts == 0


def finished(server: Any) -> float:
    """Requests that the engine has ended, however."""
    counts = re.findall(r"^penstock_requests_finished_total\S* (\S+)$", server.get("/metrics").text, re.MULTILINE)
    return sum(map(float, counts))


def test_every_value_at_its_bounds_and_beyond(server: Any, tmp_path: Path, tell: Callable[[int], None]) -> None:
    told = document(server)
    if not EXAMPLES:
        for path in [path for path in told["paths"] if re.fullmatch(SHARED, path)]:
            del told["paths"][path]
        each_body_once(told)
    checks = ",".join((*CHECKS, "negative_data_rejection", "unsupported_method"))
    made = fuzz(server, told, tmp_path, "--phases", "coverage", "--checks", checks)
    tell(made)
    assert made > 2000
    nothing_is_left(server)


def test_many_at_once_that_are_answered(server: Any, tmp_path: Path, tell: Callable[[int], None]) -> None:
    before = finished(server)
    how = ("--phases", "fuzzing", "--mode", "positive", "--workers", "4", "--max-examples", str(EXAMPLES or 40))
    made = fuzz(server, answerable(document(server)), tmp_path, *how, "--checks", ",".join(CHECKS))
    tell(made)
    nothing_is_left(server)
    assert finished(server) - before > made / 4


def test_a_server_that_ignores_what_it_does_not_know(
    serve: Callable[..., Any], tmp_path: Path, tell: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    with serve(InProcessClient(toys.open_parrot, "parrot"), toys.ToyText(), "toy/parrot") as server:
        told = document(server)
        if not EXAMPLES:
            told["paths"] = {path: told["paths"][path] for path in ("/v1/messages",)}
        tell(fuzz(server, told, tmp_path, "--phases", "coverage", "--checks", ",".join(CHECKS)))
        nothing_is_left(server)


@LONG
def test_whatever_the_document_allows_or_not(server: Any, tmp_path: Path, tell: Callable[[int], None]) -> None:
    checks = ",".join((*CHECKS, "negative_data_rejection"))
    how = ("--phases", "fuzzing", "--max-examples", str(EXAMPLES), "--continue-on-failure", "--checks", checks)
    tell(fuzz(server, document(server), tmp_path, *how))
    nothing_is_left(server)
