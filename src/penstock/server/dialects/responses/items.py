"""Declares the items of a conversation, and the response that contains an answer's items."""

from __future__ import annotations

import secrets
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from penstock.server.chat.logprobs import TokenEntry
from penstock.server.chat.structured import Schema
from penstock.server.generation.explain import AnswerReport

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(msgspec.Struct, tag_field="type", tag="input_text", forbid_unknown_fields=True):
    text: str
    prompt_cache_breakpoint: dict[str, Any] | UnsetType | None = UNSET  # without effect: every prefix is cached


class OutputText(msgspec.Struct, tag_field="type", tag="output_text", forbid_unknown_fields=True):
    text: str
    annotations: list[dict[str, Any]] | None = []
    logprobs: list[TokenEntry] | None = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text", forbid_unknown_fields=True):
    text: str


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text", forbid_unknown_fields=True):
    text: str


class MessageItem(msgspec.Struct, tag_field="type", tag="message", forbid_unknown_fields=True):
    id: str
    role: Literal["user", "assistant", "system", "developer"]
    content: list[InputText | OutputText]
    status: Status = "completed"


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning", forbid_unknown_fields=True):
    id: str
    summary: list[SummaryText] = []
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: Status = "completed"


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call", forbid_unknown_fields=True):
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status = "completed"
    namespace: str | UnsetType = UNSET  # the tool's, if it has one


class CustomCallItem(msgspec.Struct, tag_field="type", tag="custom_tool_call", forbid_unknown_fields=True):
    """Is a call of a tool whose input is text."""

    id: str
    call_id: str
    name: str
    input: str
    status: Status = "completed"
    namespace: str | UnsetType = UNSET


class ShellAction(msgspec.Struct, forbid_unknown_fields=True):
    command: list[str]
    env: dict[str, str] = {}
    type: Literal["exec"] = "exec"
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class LocalShellItem(msgspec.Struct, tag_field="type", tag="local_shell_call", forbid_unknown_fields=True):
    id: str
    call_id: str
    action: ShellAction
    status: Status = "completed"


class CallOutput(msgspec.Struct, forbid_unknown_fields=True):
    """Is a tool's result for a call."""

    id: str
    call_id: str
    output: str | list[InputText]
    status: Status = "completed"


class FunctionOutputItem(CallOutput, tag_field="type", tag="function_call_output"):
    pass


class CustomOutputItem(CallOutput, tag_field="type", tag="custom_tool_call_output"):
    pass


class LocalShellOutputItem(CallOutput, tag_field="type", tag="local_shell_call_output"):
    pass


CallItem = FunctionCallItem | CustomCallItem | LocalShellItem
OutputItem = FunctionOutputItem | CustomOutputItem | LocalShellOutputItem
Item = MessageItem | ReasoningItem | CallItem | OutputItem


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


# -- the response --------------------------------------------------------------------------------------------------


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: Schema | None = None
    description: str | None = None
    strict: bool | None = None


class TextSettings(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: str = "medium"


class ReasoningSettings(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    summary: None = None


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    reason: str = "max_output_tokens"


class ResponseError(msgspec.Struct):
    code: str
    message: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """Describes a response: the request's settings and, as far as it is generated, the answer."""

    id: str
    object: str = "response"
    created_at: int  # seconds since 1970
    completed_at: int | None = None
    status: str
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningSettings
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: TextSettings
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]  # as the client sent them
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    penstock: AnswerReport | UnsetType = UNSET
