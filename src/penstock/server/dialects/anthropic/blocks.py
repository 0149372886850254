"""Declares the content blocks that Anthropic's clients send, and reads each as one that a text model can take.

An image or a file of a user's message is refused: an answer without it would be an answer to something else. In the
result of a tool a note replaces it, and it is listed as ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from penstock.errors import InvalidRequest
from penstock.server.access.bounds import MAX_PARTS, check_count
from penstock.server.chat.tools import left_out_text
from penstock.server.context.request_context import RequestContext
from penstock.server.http.bodies import ANY_VALUE, NoEffect, read_object
from penstock.server.http.openapi import read_as

BLOCK_NO_EFFECT: NoEffect = {
    "cache_control": ANY_VALUE,
    "caller": ({"type": "direct"},),
    "citations": ([], {"enabled": False}),
    "toolset_name": (),
}


class AnthropicText(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class AnthropicThinking(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class AnthropicToolUse(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class DocumentSource(msgspec.Struct, forbid_unknown_fields=True):
    """Holds a document as text: in `data`, or in blocks."""

    type: Literal["text", "content"]
    media_type: Literal["text/plain"] | None = None
    data: str | None = None
    content: str | list[Annotated[dict[str, Any], read_as(AnthropicText, no_effect=BLOCK_NO_EFFECT)]] | None = None


class AnthropicDocument(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["document"]
    source: Annotated[dict[str, Any], read_as(DocumentSource)]
    title: str | None = None
    context: str | None = None


class AnthropicSearchResult(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["search_result"]
    source: str
    title: str
    content: list[Annotated[dict[str, Any], read_as(AnthropicText, no_effect=BLOCK_NO_EFFECT)]]


class AnthropicToolResult(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["tool_result"]
    tool_use_id: str
    content: (
        str
        | list[
            Annotated[
                dict[str, Any],
                read_as(AnthropicText, AnthropicDocument, AnthropicSearchResult, no_effect=BLOCK_NO_EFFECT),
            ]
        ]
        | None
    ) = None
    is_error: bool | None = None


AnyBlock = Annotated[
    dict[str, Any],
    read_as(
        AnthropicText,
        AnthropicThinking,
        AnthropicToolUse,
        AnthropicToolResult,
        AnthropicDocument,
        AnthropicSearchResult,
        no_effect=BLOCK_NO_EFFECT,
    ),
]
Block = AnthropicText | AnthropicThinking | AnthropicToolUse | AnthropicToolResult

TEXTS: dict[str, type[Any]] = {
    "text": AnthropicText,
    "document": AnthropicDocument,
    "search_result": AnthropicSearchResult,
}
BLOCKS: dict[str, dict[str, type[Any]]] = {  # role -> allowed types of blocks
    "system": {"text": AnthropicText},
    "user": TEXTS | {"tool_result": AnthropicToolResult},
    "assistant": {"text": AnthropicText, "thinking": AnthropicThinking, "tool_use": AnthropicToolUse},
    "tool": TEXTS,
}


class BlockReader:
    def __init__(self, context: RequestContext) -> None:
        self._context = context

    def read(self, content: str | list[dict[str, Any]], role: str, where: str) -> list[Block]:
        """Returns the blocks of a role's content; "tool" is the role of a tool's result. Documents and search results
        become text."""
        if isinstance(content, str):
            return [AnthropicText("text", content)]
        check_count(content, MAX_PARTS, where)
        read = (self._block(block, role, f"{where}[{index}]") for index, block in enumerate(content))
        return [block for block in read if block is not None]

    def _block(self, given: dict[str, Any], role: str, where: str) -> Block | None:
        kind, kinds = given.get("type"), BLOCKS[role]
        if not isinstance(kind, str) or kind not in kinds:
            return self._unread(kind, role, where)
        block = read_object(self._context, given, kinds[kind], BLOCK_NO_EFFECT, where)
        match block:
            case AnthropicDocument():
                return self._document(block, role, where)
            case AnthropicSearchResult():
                texts = self._texts(block.content, f"{where}.content")
                return AnthropicText("text", "\n".join([f"{block.title} ({block.source})", *texts]))
        assert isinstance(block, Block)
        return block

    def _unread(self, kind: object, role: str, where: str) -> AnthropicText | None:
        """Returns the replacement of an unreadable block: a text in a tool's result, nothing in an answer, where such
        blocks report a service's own actions. Elsewhere the block is refused."""
        if self._context.lenient and isinstance(kind, str) and role in ("assistant", "tool"):
            self._context.notes.ignore_kind(where, kind)
            return AnthropicText("text", left_out_text(kind)) if role == "tool" else None
        raise InvalidRequest(
            f"{where}.type: {str(kind)[:100]!r} is not supported here; use {', '.join(BLOCKS[role])}",
            param=f"{where}.type",
            code="unsupported_parameter",
        )

    def _document(self, document: AnthropicDocument, role: str, where: str) -> AnthropicText | None:
        kind = document.source.get("type")
        if kind not in ("text", "content"):
            return self._unread(f"document from {kind}", role, where)
        source = read_object(self._context, document.source, DocumentSource, {}, f"{where}.source")
        texts = self._texts(source.content or source.data or "", f"{where}.source.content")
        return AnthropicText("text", "\n".join([*filter(None, (document.title, document.context)), *texts]))

    def _texts(self, content: str | list[dict[str, Any]], where: str) -> list[str]:
        return [block.text for block in self.read(content, "system", where) if isinstance(block, AnthropicText)]
