"""Describes how Tidy writes tool calls: <do>name {"argument": "value"}</do>."""

from __future__ import annotations

from penstock.text.tool_formats import CallSyntax, ToolFormat

FORMAT = ToolFormat(
    name="tidy",
    template_markers=("<do>", "</do>"),
    calls=(CallSyntax(head="<do>{name}", tail="</do>"),),
)
