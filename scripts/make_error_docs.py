"""Writes the table of error codes in docs/troubleshooting.md from the error tree and the codes that sources name; with
--check, only says whether it is current. A code without advice here, or advice without a code, is an error."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from generated_blocks import write

import penstock
from penstock import errors
from penstock.server.http.errors import status_of

PAGE = Path(__file__).parents[1] / "docs" / "troubleshooting.md"
SOURCES = Path(penstock.__file__).parent
COMPUTED = {  # codes that no source has as one text, and what they mean
    "invalid_value": "a field has a value that is not allowed",
    "batch_cancelled": "a line of a batch did not run because the batch was cancelled",
    "batch_expired": "a line of a batch did not run because the batch expired",
}
MEANINGS = {  # those of the tree are in the docstring of errors.py
    "duplicate_custom_id": "two lines of a batch have the same `custom_id`",
    "file_in_use": "a batch reads the file",
    "file_not_found": "a batch names an unknown file",
    "internal_error": "a bug in the server",
    "invalid_completion_window": "a batch's `completion_window` is not `24h`",
    "invalid_content_type": "an upload is not `multipart/form-data`",
    "invalid_custom_id": "a batch line's `custom_id` is missing or too long",
    "invalid_endpoint": "batches do not support this endpoint",
    "invalid_form": "an upload's form is damaged, or has too many or repeated parts",
    "invalid_json": "a body, or a JSON text inside it, is not valid JSON",
    "invalid_json_line": "a line of a batch's file is not a JSON object",
    "invalid_method": "a batch line's method is not POST",
    "invalid_purpose": "a batch names a file with another purpose",
    "invalid_type": "a field has a value of the wrong type",
    "invalid_url": "a batch line's endpoint differs from the batch's",
    "missing_required_parameter": "a field is missing",
    "previous_response_not_found": "`previous_response_id` names a response that is not stored here",
    "request_timeout": "the body arrives too slowly",
    "request_too_large": "the body or the file is too large",
    "storage_full": "the folder of files and batches is full",
    "too_many_batches": "the limit of batches in progress is reached",
    "unknown_parameter": "the server is strict, and the request has an unknown field",
    "unsupported_parameter": "this server does not support the field's value",
    "uri_too_long": "the URL is too long",
    "engine_died": "the engine process died, and this answer could not continue",
    "server_stopping": "the server is stopping",
} | COMPUTED
ADVICE = {
    "error": "Read the message. `PENSTOCK_DEBUG=1` prints the traceback of a command.",
    "invalid_request": "Correct the field named by the message and `param`.",
    "context_length_exceeded": "Send a shorter prompt, ask for fewer tokens, or start with a larger `--max-len` if the"
    " model has more; `truncate_prompt_tokens` cuts the prompt's beginning.",
    "invalid_grammar": "Correct the schema, regex or grammar at the place given in the message.",
    "invalid_adapter": "Use an adapter trained for this model, under an unused name ([adapters](adapters.md)).",
    "invalid_weights": "Give weights of the same model, with the same names and shapes ([weights](weights.md)).",
    "not_supported": "Use a route that exists ([dialects](dialects.md)), or install the package named in the message.",
    "invalid_api_key": "Send the key as `Authorization: Bearer KEY` or `x-api-key: KEY`. `penstock keys list` has the"
    " names and expiry dates.",
    "permission_denied": "Use a key with this right: `penstock keys add NAME --admin` for models."
    " Without keys, allow the host with `--allowed-host`, or a web page's origin with `--cors`"
    " ([security](security.md)).",
    "rate_limit_exceeded": "Wait for `retry-after`, or raise the key's limits: remove the key and add it again.",
    "wait_too_long": "Retry after `retry-after`, allow a longer wait (`--max-wait`, the key's `--ttft-target`), or add"
    " [replicas](fleet.md).",
    "not_found": "Check the name or id in the URL.",
    "gone": "Send the original request again: streams and answers are kept for a limited time"
    " ([reconnect](reconnect.md)).",
    "model_not_found": "`penstock list` shows the names; for a server, use `GET /v1/models`.",
    "adapter_not_found": "Start with `--adapter NAME=PATH`, or load it ([adapters](adapters.md)).",
    "model_error": "Read the message. If the files are damaged, fetch the model again.",
    "malformed_file": "The file is damaged or truncated: `penstock rm` it and `penstock pull` it again.",
    "unsupported_model": "Choose a model of a supported [family](families.md) and [format](formats.md).",
    "download_error": "Check the network, `HTTPS_PROXY`, `HF_ENDPOINT` and `HF_TOKEN`. Offline, give a path"
    " ([models](models.md)).",
    "config_error": "Change the option named in the message. `penstock config` shows all options and their origin.",
    "kv_loss_too_large": "Leave out `--kv`, or use `int8` instead of `fp8` or `int4`. `--kv-loss` changes the limit"
    " ([precision](formats.md#the-kv-cache)).",
    "kv_layout_mismatch": "Give all replicas of a fleet the same model, `--kv` and `--block-size`.",
    "device_lost": "Restart the process: a kernel or hardware error persists until the process ends."
    " A server restarts its engines itself ([crashes](crashes.md)).",
    "step_failed": "Send the request again; the server's log has the reason. If the error returns, run"
    " `penstock doctor`.",
    "poisoned_request": "Do not send the request again: it kills the engine. The [post-mortem file](crashes.md) has"
    " the details; please report it.",
    "out_of_memory": "Reduce memory: a smaller `--max-len`, `--max-rows` or `--kv-memory`, `--kv int8`, or a smaller"
    " quantization. `penstock plan` shows the sizes that fit.",
    "non_finite_logits": "The weights or an adapter are damaged, or a value overflows: fetch them again, or try"
    " another quantization.",
    "overloaded": "Retry after `retry-after`; raise `--max-waiting`, or add [replicas](fleet.md).",
    "engine_unavailable": "The engine is starting: retry in a second. If the error persists, `GET /health` has"
    " the reason.",
    "engine_died": "Send the request again; the server restarts the engine. [Crashes](crashes.md) lists"
    " the answers that continue by themselves.",
    "server_stopping": "Send the request to another server, or retry after the restart.",
    "storage_failed": "Free disk space, or set another folder with `--data`.",
    "duplicate_custom_id": "Give every line its own.",
    "file_in_use": "Cancel the batch or wait for its end.",
    "file_not_found": "Upload the file first, with the same key.",
    "internal_error": "Please report it, with the log lines of the request's id.",
    "invalid_completion_window": "Send `24h`.",
    "invalid_content_type": "Upload it as a form, as `curl -F` and the SDKs do.",
    "invalid_custom_id": "Give every line a short, unique text.",
    "invalid_endpoint": "Use an endpoint listed in the message.",
    "invalid_form": "Send one `file` and one `purpose`.",
    "invalid_json": "Correct the JSON at the place given in the message. Shells remove quotes: send a file (`-d"
    " @body.json`).",
    "invalid_json_line": "Write one JSON object on each line.",
    "invalid_method": 'Write `"method": "POST"`.',
    "invalid_purpose": "Upload the file with `purpose=batch`.",
    "invalid_type": "Send the type given in the message.",
    "invalid_url": "Use the batch's endpoint in every line.",
    "invalid_value": "Send one of the values listed in the message.",
    "missing_required_parameter": "Add the field.",
    "previous_response_not_found": "Send the whole conversation. `--keep-answers` keeps responses for the next server.",
    "request_timeout": "Send the body faster, or compress it.",
    "request_too_large": "Send less; [limits](security.md#limits) has the sizes.",
    "storage_full": "Delete files, or raise `--max-data` and `--max-files`.",
    "too_many_batches": "Wait for one to end, or cancel it.",
    "unknown_parameter": "Leave the field out, or start the server without `--strict`.",
    "unsupported_parameter": "Leave the field out.",
    "uri_too_long": "Send the data in a body.",
    "batch_cancelled": "Make a new batch of these lines.",
    "batch_expired": "Make a new batch of these lines; add replicas if the machine is too slow.",
}


def codes() -> str:
    """Returns the table: the tree's codes first, then those of requests that cannot be read."""
    tree = meanings_of_tree()
    kinds = {kind.code: kind for kind in errors._tree(errors.PenstockError)}
    named = set(codes_in_sources()) | errors._KINDS.keys() | COMPUTED.keys()
    check("advice", ADVICE.keys(), named)
    check("a meaning", MEANINGS.keys() | kinds.keys(), named)
    first = [(code, kind.__name__, tree[kind.__name__]) for code, kind in kinds.items()]
    others = [(code, "", MEANINGS[code]) for code in sorted(MEANINGS)]
    rows = [
        f'| <a id="{code}"></a>`{code}` | {status(code)} | {f"`{kind}`: " if kind else ""}{meaning} | {ADVICE[code]} |'
        for code, kind, meaning in first + others
    ]
    return "\n".join(["| code | HTTP | what happened | what to do |", "|---|---|---|---|", *rows])


def meanings_of_tree() -> dict[str, str]:
    """Returns what the docstring of errors.py says about each class."""
    lines = re.findall(r"^[│├└─ ]*(\w+) {2,}(.*?)(?: {2,}HTTP \d+)?$", errors.__doc__ or "", re.MULTILINE)
    return dict(lines) | {"PenstockError": "any other error"}


def codes_in_sources() -> Iterator[str]:
    """Yields the codes that sources write out: as an argument `code`, its default, or what is assigned to it."""
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            given: list[ast.expr] = []
            if isinstance(node, ast.keyword) and node.arg == "code":
                given = [node.value]
            elif isinstance(node, ast.Assign):
                given = [node.value] if "code" in (getattr(target, "attr", "") for target in node.targets) else []
            elif isinstance(node, ast.arguments):
                defaulted = node.args[len(node.args) - len(node.defaults) :]
                given = [value for name, value in zip(defaulted, node.defaults, strict=True) if name.arg == "code"]
            yield from (each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str))


def status(code: str) -> int | str:
    """Returns the HTTP status of an error with this code; an empty text for those of a batch's error file."""
    if code.startswith("batch_"):
        return ""
    if code == "internal_error":
        return 500
    known = errors._KINDS.get(code)
    return status_of(known("") if known else errors.InvalidRequest("", code=code))


def check(what: str, there: set[str], wanted: set[str]) -> None:
    if lacking := wanted - there:
        sys.exit(f"{', '.join(sorted(lacking))}: no {what} in {__file__}")
    if left := there - wanted:
        sys.exit(f"{', '.join(sorted(left))}: no source has this code any more; take it out of {__file__}")


if __name__ == "__main__":
    write({PAGE: {"codes": codes}}, Path(__file__).name)
