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
    "invalid_value": "a field has a value that is none of those it may have",
    "batch_cancelled": "a line of a batch did not run because the batch was cancelled",
    "batch_expired": "a line of a batch did not run because the batch's time was over",
}
MEANINGS = {  # those of the tree are in the docstring of errors.py
    "duplicate_custom_id": "two lines of a batch have the same `custom_id`",
    "file_in_use": "a batch reads the file",
    "file_not_found": "a batch names a file that is not here",
    "internal_error": "a mistake in the server",
    "invalid_completion_window": "a batch has another `completion_window` than `24h`",
    "invalid_content_type": "a file was uploaded in another form than `multipart/form-data`",
    "invalid_custom_id": "a line of a batch has no `custom_id`, or one that is too long",
    "invalid_endpoint": "a batch is for an endpoint that batches do not have",
    "invalid_form": "the form of an upload is damaged, or has too many or repeated parts",
    "invalid_json": "a body, or a text in it that has to be JSON, is not JSON",
    "invalid_json_line": "a line of a batch's file is no JSON object",
    "invalid_method": "a line of a batch has another method than POST",
    "invalid_purpose": "a batch names a file that was uploaded for something else",
    "invalid_type": "a field has a value of the wrong type",
    "invalid_url": "a line of a batch is for another endpoint than the batch",
    "missing_required_parameter": "a field is missing",
    "previous_response_not_found": "the response that `previous_response_id` names is not kept here",
    "request_timeout": "the body arrives too slowly",
    "request_too_large": "the body or the file is too large",
    "storage_full": "the folder of files and batches is full",
    "too_many_batches": "as many batches are in progress as may be",
    "unknown_parameter": "the server is strict, and the request has a field that it does not know",
    "unsupported_parameter": "a field asks for something that this server does not do",
    "uri_too_long": "the URL is too long",
    "engine_died": "the engine process died, and this answer could not go on",
    "server_stopping": "the server is being stopped",
} | COMPUTED
ADVICE = {
    "error": "Read the message. `PENSTOCK_DEBUG=1` prints the traceback of a command.",
    "invalid_request": "Mend the field that the message and `param` name.",
    "context_length_exceeded": "Send a shorter prompt, ask for fewer tokens, or start with a larger `--max-len` if the"
    " model has more; `truncate_prompt_tokens` cuts the prompt's beginning.",
    "invalid_grammar": "Mend the schema, regex or grammar where the message points.",
    "invalid_adapter": "Use an adapter that was trained for this model, under a name that is free"
    " ([adapters](adapters.md)).",
    "invalid_weights": "Give weights of the same model: the same shapes and names ([weights](weights.md)).",
    "not_supported": "Use a route that is there ([dialects](dialects.md)), or install the package that is named.",
    "invalid_api_key": "Send the key as `Authorization: Bearer KEY` or `x-api-key: KEY`. `penstock keys list` has the"
    " names and expiry dates.",
    "permission_denied": "Use a key that may do this: `penstock keys add NAME --admin` for models."
    " Without keys: name the host with `--allowed-host`, a web page's origin with `--cors` ([security](security.md)).",
    "rate_limit_exceeded": "Wait for `retry-after`, or raise the key's limits: remove it and add it again.",
    "wait_too_long": "Retry after `retry-after`, allow more (`--max-wait`, the key's `--ttft-target`), or add"
    " [replicas](fleet.md).",
    "not_found": "Check the name or id in the URL.",
    "gone": "Send the request again: what it asks for is kept for a while only ([reconnect](reconnect.md)).",
    "model_not_found": "`penstock list` has the names; `GET /v1/models` those of a server.",
    "adapter_not_found": "Start with `--adapter NAME=PATH`, or load it ([adapters](adapters.md)).",
    "model_error": "Read the message; fetch the model again if its files are damaged.",
    "malformed_file": "The file is damaged or cut off: `penstock rm` it and `penstock pull` it again.",
    "unsupported_model": "Choose a model of a [family](families.md) and in a [format](formats.md) that is read.",
    "download_error": "Check the network, `HTTPS_PROXY`, `HF_ENDPOINT` and `HF_TOKEN`; offline give a path"
    " ([models](models.md)).",
    "config_error": "Change the option that the message names; `penstock config` shows what is set, and where.",
    "kv_loss_too_large": "Leave out `--kv`, or use `int8` where it was `fp8` or `int4`; `--kv-loss` moves the bound"
    " ([precision](formats.md#the-kv-cache)).",
    "kv_layout_mismatch": "Give all replicas of a fleet the same model, `--kv` and `--block-size`.",
    "device_lost": "Start the process again: such an error, of a kernel or of the hardware, stays until it ends."
    " A server does that with its engines ([crashes](crashes.md)).",
    "step_failed": "Send it again; the server's log has the reason. If it comes back, `penstock doctor`.",
    "poisoned_request": "Do not send it again: it kills the engine. The [post-mortem file](crashes.md) says what ran;"
    " please report it.",
    "out_of_memory": "Take memory back: a smaller `--max-len`, `--max-rows` or `--kv-memory`, `--kv int8`, or a smaller"
    " quantization. `penstock plan` says what fits.",
    "non_finite_logits": "The weights or an adapter are damaged, or their precision overflows: fetch them again, or try"
    " another quantization.",
    "overloaded": "Retry after `retry-after`; raise `--max-waiting`, or add [replicas](fleet.md).",
    "engine_unavailable": "Wait a second and retry: it is starting. If it stays, `GET /health` says why.",
    "engine_died": "Send it again; the engine is restarted. [Crashes](crashes.md) says which answers go on by"
    " themselves.",
    "server_stopping": "Send it again to another server, or when this one is back.",
    "storage_failed": "Free the disk, or give another folder with `--data`.",
    "duplicate_custom_id": "Give every line its own.",
    "file_in_use": "Cancel the batch or wait for its end.",
    "file_not_found": "Upload the file first, with the same key.",
    "internal_error": "Please report it, with the lines of the log that have the request's id.",
    "invalid_completion_window": "Send `24h`.",
    "invalid_content_type": "Upload it as a form, as `curl -F` and the SDKs do.",
    "invalid_custom_id": "Give the line a text of its own.",
    "invalid_endpoint": "Use one of the endpoints that the message lists.",
    "invalid_form": "Send one `file` and one `purpose`.",
    "invalid_json": "Mend the JSON where the message says. Shells eat quotes: send a file (`-d @body.json`).",
    "invalid_json_line": "Write one JSON object on each line.",
    "invalid_method": 'Write `"method": "POST"`.',
    "invalid_purpose": "Upload it with `purpose=batch`.",
    "invalid_type": "Send the type that the message names.",
    "invalid_url": "Write the batch's own endpoint into each line.",
    "invalid_value": "Send one of the values that the message lists.",
    "missing_required_parameter": "Add the field.",
    "previous_response_not_found": "Send the whole conversation. `--keep-answers` keeps responses for the next server.",
    "request_timeout": "Send the body faster, or compress what a proxy slows down.",
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
