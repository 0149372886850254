"""How families of models write tool calls and reasoning: data, recognised by the markers a chat template holds.

In a pattern a space stands for any white space or none, {name} for a function's name, {key} for a parameter's, {id} for
the call's own id and {string} for whether a value is a string.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """A call is `head`, arguments, `tail`; without a head it is a JSON object that holds name and arguments. Several
    stand in one `section`, or each by itself where there is none."""

    section: tuple[str, str] = ("", "")
    head: str = ""
    tail: str = ""
    key: str = "arguments"  # that holds them, in an object; both names are read
    separator: str = ""  # between the calls of a section
    parameter: tuple[str, tuple[str, ...]] | None = None  # each argument by itself: its opening and its endings
    quote: str = ""  # what a string stands between, where arguments are in Gemma's notation
    bare: bool = False  # an answer may begin with a call that no marker announces

    @property
    def openings(self) -> tuple[str, ...]:
        return tuple(_beginning(pattern) for pattern in (self.section[0], self.head) if pattern and not self.bare)

    @property
    def patterns(self) -> Iterator[str]:
        yield from (*self.section, self.head, self.tail, self.quote)
        if self.parameter is not None:
            yield self.parameter[0]
            yield from self.parameter[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    name: str
    signs: tuple[str, ...]  # all of them are in a template of this family
    calls: tuple[Calls, ...]  # the first that fits
    stops: tuple[str, ...] = ()  # tokens that end an answer which calls tools
    short_ids: bool = False  # the template takes only ids of nine letters and digits
    channels: bool = False  # every part of an answer says in a header what it is

    def markers(self, calling: bool) -> str:
        """Everything written around calls and parts, in a row: a special token in it is part of the text."""
        channels = "".join(CHANNEL_MARKERS) if self.channels else ""
        return channels + "".join(p for each in self.calls if calling for p in each.patterns)


CHANNEL_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")

_OBJECT = Calls(section=("<tool_call>", "</tool_call>"))
_XML = Calls(
    section=("<tool_call>", "</tool_call>"),
    head="<function={name}>",
    tail="</function>",
    parameter=("<parameter={key}>", ("\n</parameter>", "</parameter>")),
)


def _dsml(section: str) -> Calls:
    return Calls(
        section=(f"<｜DSML｜{section}>", f"</｜DSML｜{section}>"),
        head='<｜DSML｜invoke name="{name}">',
        tail="</｜DSML｜invoke>",
        parameter=('<｜DSML｜parameter name="{key}" string="{string}">', ("</｜DSML｜parameter>",)),
    )


def _deepseek(head: str, tail: str) -> Calls:
    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    return Calls(section=section, head=f"<｜tool▁call▁begin｜>{head}", tail=f"{tail}<｜tool▁call▁end｜>")


def _listed(opening: str, closing: str) -> Calls:
    return Calls(section=(f"{opening} [", f"] {closing}"), separator=",")


FAMILIES = (
    Family(
        name="harmony",
        signs=("<|channel|>", "<|message|>"),
        calls=(Calls(tail="<|call|>"),),
        stops=("<|call|>",),
        channels=True,
    ),
    Family(name="deepseek-dsml", signs=("｜DSML｜", "function_calls>"), calls=(_dsml("function_calls"),)),
    Family(name="deepseek-v4", signs=("｜DSML｜",), calls=(_dsml("tool_calls"),)),
    Family(
        name="deepseek-r1",
        signs=("<｜tool▁sep｜>", "```json"),
        calls=(_deepseek("function<｜tool▁sep｜>{name} ```json ", " ``` "),),
    ),
    Family(name="deepseek-v3.1", signs=("<｜tool▁sep｜>",), calls=(_deepseek("{name}<｜tool▁sep｜>", ""),)),
    Family(
        name="kimi",
        signs=("<|tool_calls_section_begin|>",),
        calls=(
            Calls(
                section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
                head="<|tool_call_begin|> {id} <|tool_call_argument_begin|>",
                tail="<|tool_call_end|>",
            ),
        ),
    ),
    Family(
        name="minimax",
        signs=("<minimax:tool_call>",),
        calls=(
            Calls(
                section=("<minimax:tool_call>", "</minimax:tool_call>"),
                head='<invoke name="{name}">',
                tail="</invoke>",
                parameter=('<parameter name="{key}">', ("</parameter>",)),
            ),
        ),
    ),
    Family(name="minimax-m1", signs=("<tool_calls>\\n{",), calls=(Calls(section=("<tool_calls>", "</tool_calls>")),)),
    Family(
        name="gemma",
        signs=("<|tool_call>call:",),
        calls=(Calls(head="<|tool_call>call:{name}", tail="<tool_call|>", quote='<|"|>'),),
    ),
    Family(
        name="mistral",
        signs=("[TOOL_CALLS]", "[ARGS]"),
        calls=(Calls(head="[TOOL_CALLS]{name}[ARGS]"), Calls(head="[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]")),
        short_ids=True,
    ),
    Family(name="mistral-list", signs=("[TOOL_CALLS]",), calls=(_listed("[TOOL_CALLS]", ""),), short_ids=True),
    Family(
        name="glm",
        signs=("<arg_key>",),
        calls=(
            Calls(
                head="<tool_call> {name} ",
                tail="</tool_call>",
                parameter=("<arg_key>{key}</arg_key> <arg_value>", ("</arg_value>",)),
            ),
        ),
    ),
    Family(
        name="seed",
        signs=("<seed:tool_call>",),
        calls=(
            Calls(
                section=("<seed:tool_call>", "</seed:tool_call>"),
                head="<function={name}>",
                tail="</function>",
                parameter=("<parameter={key}>", ("</parameter>",)),
            ),
        ),
    ),
    Family(name="apriel", signs=("<tool_calls>[",), calls=(_listed("<tool_calls>", "</tool_calls>"),)),
    Family(name="nemotron-v2", signs=("<TOOLCALL>",), calls=(_listed("<TOOLCALL>", "</TOOLCALL>"),)),
    Family(name="gigachat", signs=("<|function_call|>",), calls=(Calls(section=("<|function_call|>", "")),)),
    Family(name="qwen-coder", signs=("<tool_call>", "<function=", "<parameter="), calls=(_XML,)),
    Family(name="hermes", signs=("<tool_call>",), calls=(_OBJECT,)),
    Family(
        name="functionary",
        signs=("<function=", "</function>"),
        calls=(Calls(head="<function={name}>", tail="</function>"),),
        stops=("<|eom_id|>",),
    ),
    Family(
        name="llama",
        signs=("<|start_header_id|>", '"parameters": '),
        calls=(Calls(bare=True, separator=";", key="parameters"), Calls(section=("<|python_tag|>", ""), separator=";")),
        stops=("<|eom_id|>",),
    ),
)
PLAIN = Family(
    name="json", signs=(), calls=(Calls(bare=True), Calls(bare=True, section=("[", "]"), separator=","), _OBJECT)
)

REASONING = (  # where a template has the end marker, an answer may begin with such a block
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
)


class Format(NamedTuple):
    """How a model's answers are written."""

    family: Family
    reasoning: tuple[str, str] | None = None  # the markers around it

    def opened(self, prompt: str) -> bool:
        """Whether an answer to the prompt begins within its reasoning."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning[0])

    def plain(self, calling: bool) -> bool:
        """Whether an answer holds content alone."""
        return not (calling or self.reasoning or self.family.channels)

    def markers(self, calling: bool) -> str:
        return self.family.markers(calling) + "".join(self.reasoning or ())


def family_of(template: str, override: str | None = None) -> Family:
    """The family whose markers the template holds, or the one asked for by name; plain JSON where there are none."""
    if override is None:
        return next((each for each in FAMILIES if all(sign in template for sign in each.signs)), PLAIN)
    known = {each.name: each for each in (*FAMILIES, PLAIN)}
    if override not in known:
        raise ConfigError(f"there is no tool family {override!r}; there are: {', '.join(known)}")
    return known[override]


def reasoning_of(template: str) -> tuple[str, str] | None:
    return next((each for each in REASONING if each[1] in template), None)


def pieces(pattern: str) -> list[str]:
    """A pattern as literals, fields and spaces."""
    return re.findall(r"\{\w+\}|\s|(?:(?!\{\w+\})\S)+", pattern)


def _beginning(pattern: str) -> str:
    return pieces(pattern)[0]
