"""Defines the formats of tool calls and reasoning as data. A format is recognised by markers in the template.

In a pattern, a space matches any or no white space, {name} a function's name, {key} a parameter's, {id} the call's id
and {string} whether a value is a string.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import ConfigError
from penstock.plugins import plugins


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """Describes how a call is written: `head`, arguments, `tail`. Without a head it is a JSON object with name and
    arguments. A `section` encloses several calls.
    """

    section: tuple[str, str] = ("", "")
    head: str = ""
    tail: str = ""
    key: str = "arguments"  # key of the arguments in a JSON object; the parser also reads "parameters"
    separator: str = ""  # between the calls of a section
    parameter: tuple[str, tuple[str, ...]] | None = None  # separate parameters: their opening and endings
    quote: str = ""  # encloses strings in Gemma's notation
    bare: bool = False  # an answer may begin with a call without a marker

    @property
    def openings(self) -> tuple[str, ...]:
        return tuple(_beginning(pattern) for pattern in (self.section[0], self.head) if pattern and not self.bare)

    @property
    def patterns(self) -> Iterator[str]:
        yield from (*self.section, self.head, self.tail, self.quote)
        if self.parameter is not None:
            yield self.parameter[0]
            yield from self.parameter[1]


class ToolPrompt(NamedTuple):
    """Holds the tool instructions that a model was trained with but its template lacks."""

    before: str
    each: str  # {name}, {description} and {parameters} of one tool
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Describes how a family of models writes tool calls."""

    name: str
    template_markers: tuple[str, ...]  # a template with all of them has this format
    calls: tuple[CallSyntax, ...]  # the parser takes the first match; grammars allow only the first
    stops: tuple[str, ...] = ()  # tokens that end an answer with calls
    short_ids: bool = False  # the template accepts only ids of nine letters and digits
    channels: bool = False  # every part of an answer has a header with its channel
    reasoning: tuple[str, str] | None = None  # the markers around reasoning, if the template lacks them
    content: tuple[str, str] = ("", "")  # the markers around content
    prompt: ToolPrompt | None = None

    def markers(self, calling: bool) -> str:
        """Returns all markers joined. Special tokens in them are part of the text."""
        around = "".join(CHANNEL_MARKERS if self.channels else self.content)
        return around + "".join(p for each in self.calls if calling for p in each.patterns)


CHANNEL_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")

_OBJECT = CallSyntax(section=("<tool_call>", "</tool_call>"))
_XML = CallSyntax(
    section=("<tool_call>", "</tool_call>"),
    head="<function={name}>",
    tail="</function>",
    parameter=("<parameter={key}>", ("\n</parameter>", "</parameter>")),
)


def _dsml(section: str) -> CallSyntax:
    return CallSyntax(
        section=(f"<｜DSML｜{section}>", f"</｜DSML｜{section}>"),
        head='<｜DSML｜invoke name="{name}">',
        tail="</｜DSML｜invoke>",
        parameter=('<｜DSML｜parameter name="{key}" string="{string}">', ("</｜DSML｜parameter>",)),
    )


def _deepseek(head: str, tail: str) -> CallSyntax:
    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    return CallSyntax(section=section, head=f"<｜tool▁call▁begin｜>{head}", tail=f"{tail}<｜tool▁call▁end｜>")


_DEEPSEEK_PROMPT = ToolPrompt(  # from the model card of V3.1
    before="## Tools\nYou have access to the following tools:\n\n",
    each="### {name}\nDescription: {description}\n\nParameters: {parameters}\n\n",
    after=(
        "IMPORTANT: ALWAYS adhere to this exact format for tool use:\n"
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments<｜tool▁call▁end｜>"
        "{additional_tool_calls}<｜tool▁calls▁end｜>\n\n"
        "Where:\n\n"
        "- `tool_call_name` must be an exact match to one of the available tools\n"
        "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema\n"
        "- For multiple tool calls, chain them directly without separators or spaces"
    ),
)


def _listed(opening: str, closing: str) -> CallSyntax:
    return CallSyntax(section=(f"{opening} [", f"] {closing}"), separator=",")


TOOL_FORMATS = (
    ToolFormat(
        name="harmony",
        template_markers=("<|channel|>", "<|message|>"),
        calls=(CallSyntax(tail="<|call|>"),),
        stops=("<|call|>",),
        channels=True,
    ),
    ToolFormat(
        name="solar",
        template_markers=("<|tool_call:args|>",),
        calls=(
            CallSyntax(
                section=("<|tool_calls|>", "<|calls|>"),
                head="<|tool_call:begin|>{id}<|tool_call:name|>{name}<|tool_call:args|>",
                tail="<|tool_call:end|>",
            ),
        ),
        stops=("<|calls|>",),
        reasoning=("<|think|>", "<|end|><|begin|>assistant"),
        content=("<|content|>", "<|end|>"),
    ),
    ToolFormat(
        name="deepseek-dsml", template_markers=("｜DSML｜", "function_calls>"), calls=(_dsml("function_calls"),)
    ),
    ToolFormat(name="deepseek-v4", template_markers=("｜DSML｜",), calls=(_dsml("tool_calls"),)),
    ToolFormat(
        name="deepseek-r1",
        template_markers=("<｜tool▁sep｜>", "```json"),
        calls=(_deepseek("function<｜tool▁sep｜>{name} ```json ", " ``` "),),
    ),
    ToolFormat(
        name="deepseek-v3.1",
        template_markers=("<｜tool▁sep｜>",),
        calls=(_deepseek("{name}<｜tool▁sep｜>", ""),),
        prompt=_DEEPSEEK_PROMPT,
    ),
    ToolFormat(
        name="kimi",
        template_markers=("<|tool_calls_section_begin|>",),
        calls=(
            CallSyntax(
                section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
                head="<|tool_call_begin|> {id} <|tool_call_argument_begin|>",
                tail="<|tool_call_end|>",
            ),
        ),
    ),
    ToolFormat(
        name="minimax",
        template_markers=("<minimax:tool_call>",),
        calls=(
            CallSyntax(
                section=("<minimax:tool_call>", "</minimax:tool_call>"),
                head='<invoke name="{name}">',
                tail="</invoke>",
                parameter=('<parameter name="{key}">', ("</parameter>",)),
            ),
        ),
    ),
    ToolFormat(
        name="minimax-m1",
        template_markers=("<tool_calls>\\n{",),
        calls=(CallSyntax(section=("<tool_calls>", "</tool_calls>")),),
    ),
    ToolFormat(
        name="gemma",
        template_markers=("<|tool_call>call:",),
        calls=(CallSyntax(head="<|tool_call>call:{name}", tail="<tool_call|>", quote='<|"|>'),),
    ),
    ToolFormat(
        name="mistral",
        template_markers=("[TOOL_CALLS]", "[ARGS]"),
        calls=(CallSyntax(head="[TOOL_CALLS]{name}[ARGS]"), CallSyntax(head="[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]")),
        short_ids=True,
    ),
    ToolFormat(
        name="mistral-list", template_markers=("[TOOL_CALLS]",), calls=(_listed("[TOOL_CALLS]", ""),), short_ids=True
    ),
    ToolFormat(
        name="glm",
        template_markers=("<arg_key>",),
        calls=(
            CallSyntax(
                head="<tool_call> {name} ",
                tail="</tool_call>",
                parameter=("<arg_key>{key}</arg_key> <arg_value>", ("</arg_value>",)),
            ),
        ),
    ),
    ToolFormat(
        name="seed",
        template_markers=("<seed:tool_call>",),
        calls=(
            CallSyntax(
                section=("<seed:tool_call>", "</seed:tool_call>"),
                head="<function={name}>",
                tail="</function>",
                parameter=("<parameter={key}>", ("</parameter>",)),
            ),
        ),
    ),
    ToolFormat(name="apriel", template_markers=("<tool_calls>[",), calls=(_listed("<tool_calls>", "</tool_calls>"),)),
    ToolFormat(name="nemotron-v2", template_markers=("<TOOLCALL>",), calls=(_listed("<TOOLCALL>", "</TOOLCALL>"),)),
    ToolFormat(
        name="gigachat", template_markers=("<|function_call|>",), calls=(CallSyntax(section=("<|function_call|>", "")),)
    ),
    ToolFormat(name="qwen-coder", template_markers=("<tool_call>", "<function=", "<parameter="), calls=(_XML,)),
    ToolFormat(name="hermes", template_markers=("<tool_call>",), calls=(_OBJECT,)),
    ToolFormat(
        name="functionary",
        template_markers=("<function=", "</function>"),
        calls=(CallSyntax(head="<function={name}>", tail="</function>"),),
        stops=("<|eom_id|>",),
    ),
    ToolFormat(
        name="llama",
        template_markers=("<|start_header_id|>", '"parameters": '),
        calls=(
            CallSyntax(bare=True, separator=";", key="parameters"),
            CallSyntax(section=("<|python_tag|>", ""), separator=";"),
        ),
        stops=("<|eom_id|>",),
    ),
)
PLAIN = ToolFormat(
    name="json",
    template_markers=(),
    calls=(CallSyntax(bare=True), CallSyntax(bare=True, section=("[", "]"), separator=","), _OBJECT),
)

REASONING = (  # if a template has the second marker, answers may begin with such a block
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
)


class AnswerFormat(NamedTuple):
    """Describes how a model writes its answers."""

    tool_format: ToolFormat
    reasoning: tuple[str, str] | None = None  # the markers around reasoning

    def opened(self, prompt: str) -> bool:
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning[0])

    def plain(self, calling: bool) -> bool:
        marked = self.tool_format.channels or self.tool_format.content[0]
        return not (calling or self.reasoning or marked)

    def markers(self, calling: bool) -> str:
        """Returns all markers joined, including those around calls if `calling`."""
        return self.tool_format.markers(calling) + "".join(self.reasoning or ())


def find_tool_format(template: str, override: str | None = None) -> ToolFormat:
    """Returns the format named `override`, or the one whose markers are in the template, or plain JSON."""
    if override is None:
        matching = (each for each in _formats() if all(marker in template for marker in each.template_markers))
        return next(matching, PLAIN)
    known = {each.name: each for each in (*_formats(), PLAIN)}
    if override not in known:
        raise ConfigError(f"there is no tool format {override!r}; there are {', '.join(known)}")
    return known[override]


def _formats() -> Iterator[ToolFormat]:
    """Yields our formats, then the plug-ins, which are searched only if they are needed."""
    yield from TOOL_FORMATS
    for each in plugins("penstock.tool_formats"):
        yield each.load(ToolFormat)


def reasoning_of(template: str) -> tuple[str, str] | None:
    return next((each for each in REASONING if each[1] in template), None)


def pieces(pattern: str) -> list[str]:
    return re.findall(r"\{\w+\}|\s|(?:(?!\{\w+\})\S)+", pattern)


def _beginning(pattern: str) -> str:
    return pieces(pattern)[0]
