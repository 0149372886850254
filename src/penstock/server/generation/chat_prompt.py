"""Renders chats as vLLM's fields ask for: with another template, with documents, or up to the last message."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import msgspec

from penstock.errors import InvalidRequest
from penstock.server.context.request_context import RequestContext
from penstock.server.http.bodies import ignore_unsupported
from penstock.server.models.served_model import ServedModel, off_loop
from penstock.templates.process import RenderProcess
from penstock.text import ChatPrompt, ChatTemplate, Text, Tokenizer
from penstock.text.chat import continue_last

MAX_TEMPLATE = 2**16  # characters of a template in a request
REQUESTED = RenderProcess()  # renders the templates of requests, not of models


class PromptFields(msgspec.Struct, kw_only=True):
    """Says how a chat becomes a prompt."""

    template: str | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None  # left out: true, unless the last message is continued
    continue_final_message: bool = False
    add_special_tokens: bool | None = None

    @property
    def usual(self) -> bool:
        return self == PromptFields()


async def render_chat(
    served: ServedModel,
    context: RequestContext,
    messages: list[dict[str, Any]],
    given: PromptFields,
    kwargs: dict[str, Any],
) -> ChatPrompt:
    """Returns the prompt; `kwargs` are the template's other variables."""
    text = served.text if given.template is None else _with_template(served, given.template)
    if given.continue_final_message and given.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message continues a message and add_generation_prompt begins one: send one of them",
            param="continue_final_message",
        )
    if given.documents is not None:
        if text.takes("documents"):
            kwargs = kwargs | {"documents": given.documents}
        else:
            ignore_unsupported(context, "documents", given.documents)
    begins = not given.continue_final_message if given.add_generation_prompt is None else given.add_generation_prompt
    render = partial(_render, served.text, text, messages, given, kwargs, begins)
    size = sum(len(message["content"] or "") for message in messages)
    return await off_loop(size, render, text.chat_template.process if given.template is None else REQUESTED)


def _render(
    own: Text, text: Text, messages: list[dict[str, Any]], given: PromptFields, kwargs: dict[str, Any], begins: bool
) -> ChatPrompt:
    """Returns the prompt that `text`'s template makes. How the model writes its answers is known from its own one."""
    try:
        prompt = text.render_chat(messages, add_generation_prompt=begins, **kwargs)
    except InvalidRequest as error:
        if given.template is None:
            raise
        message = error.message.replace("the model's chat template", "chat_template")
        raise InvalidRequest(message, param="chat_template") from error
    if given.continue_final_message:
        prompt = continue_last(prompt, messages[-1]["content"] or "")
    tokens = own.tokenizer.encode(prompt, special=True, bos=given.add_special_tokens is not False)
    return ChatPrompt(tokens, own.format.opened(prompt))


def _with_template(served: ServedModel, source: str) -> Text:
    if not served.trust_templates:
        raise InvalidRequest(
            "chat_template: this server renders chats with its model's own template, because one in a request is a "
            "program; start it with --trust-request-chat-template to allow them",
            param="chat_template",
        )
    if len(source) > MAX_TEMPLATE:
        raise InvalidRequest(
            f"chat_template has {len(source)} characters; the limit is {MAX_TEMPLATE}: shorten it",
            param="chat_template",
        )
    return served.text.with_template(_compiled(source, served.text.tokenizer))


@lru_cache(maxsize=32)
def _compiled(source: str, tokenizer: Tokenizer) -> ChatTemplate:
    """Returns a template that came in a request. Clients send the same one with every request."""
    return ChatTemplate({"default": source}, tokenizer.names).isolated(REQUESTED)
