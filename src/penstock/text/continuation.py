"""Cuts a rendered chat so that the model continues the last message."""

from __future__ import annotations

from penstock.errors import InvalidRequest


def continue_last(rendered: str, content: str) -> str:
    """Returns the rendered chat up to the end of its last message's content, without the template's ending. Templates
    may strip the content; if they drop or rewrite it, the chat cannot be continued.
    """
    stripped = content.strip()
    at = rendered.rfind(stripped)
    if not stripped or at < 0:
        raise InvalidRequest(
            "the last message cannot be continued: it is empty, or the chat template does not write its content as "
            "it is; send it without continue_final_message",
            param="continue_final_message",
        )
    kept = content.lstrip()
    return rendered[: at + len(kept if rendered.startswith(kept, at) else stripped)]
