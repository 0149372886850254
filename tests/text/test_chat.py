from __future__ import annotations

import re
from datetime import datetime

import pytest

from penstock.errors import ContextTooLong, InvalidRequest, MalformedFile
from penstock.templates import CallArguments, template
from penstock.text import ChatTemplate, Text
from penstock.text.tool_formats import PLAIN

HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def render(source, messages=HI, **kwargs):
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}).render(messages, **kwargs)


def test_a_conversation():
    source = (
        "{{ bos_token }}\n"
        "{% for message in messages %}\n"
        "    {% if message.role == 'user' %}\n"
        "Q: {{ message['content'] | trim }}\n"
        "    {% else %}\n"
        "A: {{ message.content }}\n"
        "    {% endif %}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}A:{% endif %}"
    )
    messages = [*HI, {"role": "assistant", "content": "hello"}, {"role": "user", "content": " bye "}]
    assert render(source, messages) == "<s>\nQ: hi\nA: hello\nQ: bye\nA:"
    assert render(source, messages, add_generation_prompt=False) == "<s>\nQ: hi\nA: hello\nQ: bye\n"


SMOLLM3 = (
    "{% if xml_tools or python_tools %}{% for tool in xml_tools[:] %}{{ tool | string }}{% endfor %} Call them within "
    "<tool_call></tool_call>.{{ python_tools }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def test_functions_under_the_name_that_smollm3_reads():
    chat = ChatTemplate({"default": SMOLLM3}, {})
    call = {"id": "1", "function": {"name": "f", "arguments": CallArguments({"x": 1})}}
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "5"}]
    assert chat.format.tool_format.name == "hermes"
    assert chat.format.tool_format.calls[0].section[0] == "<tool_call>"
    assert len(chat.format.tool_format.calls) == 1
    assert chat.render(messages, tools=TOOLS) == (
        "{'name': 'f'} Call them within <tool_call></tool_call>.[user]hi"
        '[assistant]<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>[tool]5'
    )
    assert ".P[user]hi" in chat.render(HI, xml_tools=[], python_tools="P")


SOLAR = """
{%- set think_render_option = think_render_option if think_render_option is defined else "lastthink" %}
{%- set last_user_idx = namespace(value=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {%- set last_user_idx.value = loop.index0 -%}
    {%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
         {{- "<|begin|>user<|content|>" + message.content + "<|end|>" }}
    {%- elif message.role == 'assistant' -%}
        {%- if think_render_option == "all" -%}
            {%- if message.reasoning -%}
                {{- "<|begin|>assistant<|think|>" + message.reasoning + "<|end|>" }}
            {%- endif -%}
        {%- elif think_render_option == "lastthink" -%}
            {%- if message.reasoning and loop.index0 > last_user_idx.value -%}
                {{- "<|begin|>assistant<|think|>" + message.reasoning + "<|end|>" }}
            {%- endif -%}
        {%- endif -%}
        {%- if message.tool_calls -%}
            {{- "<|begin|>assistant<|tool_calls|>" }}
            {%- for tool_call in message.tool_calls -%}
                {{- "<|tool_call:begin|>" + tool_call.id +"<|tool_call:name|>" + tool_call.function.name + "<|tool_call:args|>" }}
                {{- tool_call.function.arguments | tojson }}
                {{- "<|tool_call:end|>" }}
            {%- endfor -%}
            {{- "<|calls|>" }}
        {%- else -%}
            {{- "<|begin|>assistant<|content|>" + message.content + "<|end|>" }}
        {%- endif -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|begin|>assistant" }}
{%- endif -%}
"""  # noqa: E501


def test_solar_drops_reasoning_of_earlier_turns():
    chat = ChatTemplate({"default": SOLAR}, {})
    assert chat.format.tool_format.name == "solar"
    assert chat.format.reasoning == ("<|think|>", "<|end|><|begin|>assistant")
    call = {"id": "a1b2c3d4e5", "function": {"name": "f", "arguments": CallArguments({"x": 1})}}
    messages = [
        *HI,
        {"role": "assistant", "content": "yes", "reasoning": "FIRST"},
        {"role": "user", "content": "go on"},
        {"role": "assistant", "content": None, "reasoning": "SECOND", "tool_calls": [call]},
    ]
    before = "<|begin|>user<|content|>hi<|end|>"
    assert chat.render(messages) == (
        f"{before}<|begin|>assistant<|content|>yes<|end|><|begin|>user<|content|>go on<|end|>"
        "<|begin|>assistant<|think|>SECOND<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>a1b2c3d4e5"
        '<|tool_call:name|>f<|tool_call:args|>{"x": 1}<|tool_call:end|><|calls|><|begin|>assistant'
    )
    assert f"{before}<|begin|>assistant<|think|>FIRST<|end|>" in chat.render(messages, think_render_option="all")
    assert not chat.format.opened(chat.render(messages))


DEEPSEEK = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.tool_calls }}{% endfor %}{# <｜tool▁sep｜> #}"


def test_deepseek_is_told_of_tools_in_the_words_of_its_training():
    chat = ChatTemplate({"default": DEEPSEEK}, {})
    tool = {"function": {"name": "f", "description": "Does it.", "parameters": {"type": "object"}}}
    said = chat.render([{"role": "system", "content": "Be brief."}, *HI], tools=[tool])
    assert said.startswith("[system]Be brief.[system]## Tools\n")
    assert '### f\nDescription: Does it.\n\nParameters: {"type": "object"}\n' in said
    assert "<｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments<｜tool▁call▁end｜>" in said
    assert said.endswith("[user]hi")
    assert [call.bare for call in chat.format.tool_format.calls] == [False]


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        ("{% for i in [0, 1, 2] %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{% for i in [0, 1, 2] %}{% if i == 1 %}{% break %}{% endif %}{{ i }}{% endfor %}", "0"),
        ("{{ {'b': '<é>', 'a': [1]} | tojson }}", '{"b": "<é>", "a": [1]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=True) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{% generation %}said {{ messages[0].content }}{% endgeneration %}.", "said hi."),
        ("{{ tools is none }} {{ documents is none }} {{ missing is defined }}", "True True False"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{{ eos_token }}|{{ enable_thinking }}", "|False"),
    ],
)
def test_what_templates_rely_on(source, rendered):
    assert render(source, enable_thinking=False) == rendered


def test_today():
    year = int(render("{{ strftime_now('%Y') }}"))
    assert abs(year - datetime.now().year) <= 1


def test_a_template_of_its_own_for_tools():
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools[0].function.name }}"}, {})
    assert template.render(HI) == "plain"
    assert template.render(HI, tools=TOOLS) == "f"
    assert template.render(HI, tools=[]) == "plain"
    assert ChatTemplate({"default": "plain"}, {}).render(HI, tools=TOOLS) == "plain"
    with pytest.raises(InvalidRequest, match="it has tool_use"):
        ChatTemplate({"tool_use": "x"}, {}).render(HI)


def test_tools_in_words_for_a_template_without_a_place_for_them():
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "be brief"},
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    rendered = render(source, messages, tools=TOOLS)
    assert rendered.startswith("system: be brief\nuser: You can call functions.")
    assert '{"name": "f"}\n\nhi\nassistant: {"name": "f", "arguments": {"a": 1}}\n' in rendered
    assert rendered.endswith("user: The function returned: done\n")
    assert ChatTemplate({"default": source}, {}).format.tool_format.calls == PLAIN.calls * 2


@pytest.mark.parametrize(
    "written",
    ["{{ c.arguments | tojson }}", "{{ c.arguments }}", "{{ '' + c.arguments + '' }}", "{{ 'x'[1:] ~ c.arguments }}"],
)
def test_arguments_however_a_template_writes_them(written):
    call = {"function": {"name": "f", "arguments": CallArguments(a="é")}}
    source = "{% for t in messages[0].tool_calls %}{% set c = t.function %}" + written + "{% endfor %}"
    assert render(source, [{"role": "assistant", "content": None, "tool_calls": [call]}]) == '{"a": "é"}'


@pytest.mark.parametrize(
    ("source", "rendered"),
    [
        ("{{ messages[0].content }}{{ messages[0].tool_calls }}", "1"),
        ("{% if messages[0].content is none %}none{% endif %}{{ messages[0].tool_calls }}", "none1"),
        ("{{ messages[0].content is none or messages[0].content | length }}{{ messages[0].tool_calls }}", "True1"),
        ("{{ messages[0].content | length }}{# content is none #}{{ messages[0].tool_calls }}", "01"),
    ],
)
def test_no_content_as_a_template_takes_it(source, rendered):
    assert render(source, [{"role": "assistant", "content": None, "tool_calls": 1}]) == rendered


def test_the_family_may_be_named():
    template = ChatTemplate({"default": "{{ tools }}<tool_call>"}, {}, family="glm")
    assert template.format.tool_format.name == "glm"


def test_the_template_refuses_in_its_own_words():
    with pytest.raises(InvalidRequest, match="roles must alternate") as refusal:
        render("{{ raise_exception('roles must alternate') }}")
    assert refusal.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{{ missing.x }}", "missing"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_a_template_that_fails(source, message):
    with pytest.raises(InvalidRequest, match=message):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ range(10000000) | list }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_the_sandbox_holds(source):
    with pytest.raises(InvalidRequest):
        render(source)


def test_a_template_cannot_grow_without_end(monkeypatch):
    monkeypatch.setattr(template, "MAX_CHARACTERS", 1000)
    with pytest.raises(ContextTooLong, match="1000"):
        render("{% for i in range(600) %}xx{% endfor %}")


def test_a_template_with_an_error_in_it(byte_level_vectors):
    metadata = byte_level_vectors["metadata"] | {"tokenizer.chat_template": "\n{% for %}"}
    text = Text.from_gguf(metadata)
    with pytest.raises(InvalidRequest, match=re.compile("line 2.*completions")):
        text.encode_chat(HI)
    assert text.encode_prompt("hi")


def test_templates_in_metadata(byte_level_vectors):
    metadata = byte_level_vectors["metadata"] | {
        "tokenizer.chat_template": "{{ messages[0].content }}{{ eos_token }}",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "tools",
    }
    text = Text.from_gguf(metadata)
    assert text.template.render(HI) == "hi<|im_end|>"
    assert text.template.render(HI, tools=TOOLS) == "tools"
    assert text.encode_chat(HI)[-1] in text.tokenizer.eos_ids
    with pytest.raises(MalformedFile, match="'default'"):
        Text.from_gguf(metadata | {"tokenizer.chat_template": 7})


def test_without_a_template_chats_are_chatml(byte_level_vectors):
    text = Text.from_gguf(byte_level_vectors["metadata"])
    assert text.template is None
    assert text.render_chat(HI) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert text.encode_chat(HI) == text.encode_prompt(text.render_chat(HI))
    assert text.with_template_text("{{ messages[0].content }}!").render_chat(HI) == "hi!"


def test_thinking_is_on_in_a_template_that_is_given(byte_level_vectors):
    text = Text.from_gguf(byte_level_vectors["metadata"]).with_template_text(
        "{% if not enable_thinking %}off{% endif %}"
    )
    assert text.render_chat(HI) == ""
    assert text.render_chat(HI, enable_thinking=False) == "off"
