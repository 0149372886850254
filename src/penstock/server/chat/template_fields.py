"""Maps the fields about thinking and verbosity of all dialects to variables of the model's chat template."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.server.context.request_context import RequestContext
from penstock.server.http.bodies import ignore_unsupported
from penstock.text import Text

NO_EFFORT = "none"  # the effort that turns thinking off


class ThinkingWish(msgspec.Struct, forbid_unknown_fields=True):
    """Is an object that asks for thinking, as OpenRouter's, DeepSeek's and Anthropic's clients spell it."""

    type: str | None = None  # disabled; others turn thinking on
    enabled: bool | None = None
    effort: str | None = None
    max_tokens: int | None = None
    budget_tokens: int | None = None

    @property
    def wanted(self) -> bool:
        return self.enabled is not False and self.type != "disabled"

    @property
    def budget(self) -> int | None:
        return self.budget_tokens or self.max_tokens


def read_wish(context: RequestContext, text: Text, wish: ThinkingWish, param: str) -> dict[str, Any]:
    """Returns the template's fields for an object that asks for thinking."""
    if wish.effort is not None and wish.wanted:
        return think_with_effort(context, text, wish.effort, f"{param}.effort")
    return switch_thinking(context, text, wish.wanted, param, wish)


def thinking_budget(
    thinking: ThinkingWish | None, reasoning: ThinkingWish | None, tokens: int | None
) -> tuple[str, int | None]:
    for param, wish in (("thinking.budget_tokens", thinking), ("reasoning.max_tokens", reasoning)):
        if wish is not None and wish.budget:
            return param, wish.budget
    return "thinking_budget", tokens


def switch_thinking(context: RequestContext, text: Text, wanted: bool, param: str, value: object) -> dict[str, Any]:
    """Returns the template's fields that turn thinking on or off. `param` and its `value` asked for it; they are listed
    as ignored if the model cannot comply."""
    if text.takes("enable_thinking"):
        return {"enable_thinking": wanted}
    thinks = not text.format.plain(calling=False)
    if wanted != thinks:
        ignore_unsupported(context, param, value)
    return {}


def think_with_effort(context: RequestContext, text: Text, effort: str | None, param: str) -> dict[str, Any]:
    """Returns the template's fields for an effort: its setting of that name, or else whether the model thinks."""
    if effort is None:
        return {}
    if effort != NO_EFFORT and text.takes("reasoning_effort"):
        return {"reasoning_effort": effort}
    return switch_thinking(context, text, effort != NO_EFFORT, param, effort)


def read_template_kwargs(context: RequestContext, text: Text, kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the variables that the template uses; others are listed as ignored."""
    fields: dict[str, Any] = {}
    for name, value in (kwargs or {}).items():
        if name in ("messages", "tools", "add_generation_prompt") or not text.takes(name):
            ignore_unsupported(context, f"chat_template_kwargs.{name}", value)
        else:
            fields[name] = value
    return fields


def read_verbosity(context: RequestContext, text: Text, verbosity: str | None, param: str) -> dict[str, Any]:
    if verbosity in (None, "medium"):
        return {}
    if text.takes("verbosity"):
        return {"verbosity": verbosity}
    ignore_unsupported(context, param, verbosity)
    return {}
