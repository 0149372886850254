"""Templates that would take gigabytes or run for years: the request that brought one is refused, and nobody waits."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ContextTooLong, InvalidRequest
from penstock.templates.process import RenderProcess, _spare
from penstock.text import ChatTemplate
from penstock.text.named_templates import TEMPLATES
from tests.attacks.conftest import HELLO, WAIT, Attacked, serving

SQUARES = (
    "{% set ns = namespace(x=12345678901234567890) %}{% for i in range(40) %}{% set ns.x = ns.x * ns.x %}{% endfor %}"
    "{{ ns.x }}"
)
LISTS = "{% set l = [[1] * 100000] * 100000 %}{{ l | tojson }}"
LARGE = (  # they want gigabytes at once
    "{{ ('\\t' * 4000000).expandtabs(4000000) }}",
    "{{ ('a' * 4000000).translate({97: 'b' * 4000000}) }}",
    "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = ns.l + ['x'.center(4000000)] %}{% endfor %}",
    "{{ '%999999d' * 4000 % ((1,) * 4000) }}",
)


@pytest.mark.parametrize("template", [SQUARES, LISTS, "{{ lipsum(n=3000000) }}", *LARGE])
def test_the_server_neither_waits_nor_grows(attacked: Attacked, template: str) -> None:
    assert attacked.chat().status_code == 200
    before = attacked.most_memory
    answers = []
    attack = threading.Thread(target=lambda: answers.append(attacked.chat(chat_template=template)))
    attack.start()
    began = time.monotonic()
    assert attacked.chat().status_code == 200  # with the model's own template
    assert time.monotonic() - began < 2.0
    attack.join(WAIT)
    (answer,) = answers
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] in ("chat_template", "messages")
    assert attacked.most_memory - before < 100 * 2**20
    assert attacked.chat(chat_template="{{ messages[0].content }}").status_code == 200


def test_a_models_own_template_is_no_better(babbler: Path, tmp_path: Path) -> None:
    """Its process is stopped and started again."""
    slow = "{% if messages[0].content == 'slow' %}" + LISTS + "{% endif %}{{ messages[0].content }}"
    with serving(babbler, tmp_path, "--chat-template", slow) as server:
        refused = server.chat(messages=[{"role": "user", "content": "slow"}])
        assert refused.status_code == 400, refused.text
        assert "chat template was stopped" in refused.json()["error"]["message"]
        assert server.chat().status_code == 200
        children = subprocess.run(["ps", "--ppid", str(server.process.pid), "-o", "args="], capture_output=True).stdout
        assert children.count(b"penstock.templates.render_worker") == 1
    assert "Traceback" not in server.logged


# -- alone ------------------------------------------------------------------------------------------------------------


def isolated(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}).isolated(RenderProcess())


def test_a_process_renders_the_same() -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ m.tool_calls[0].function.arguments }}{% endfor %}"
    from penstock.templates import CallArguments

    call = {"function": {"name": "f", "arguments": CallArguments({"é": "\ud800"})}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, HELLO[0] | {"tool_calls": [call]}]
    here = ChatTemplate({"default": source}, {"bos_token": "<s>"})
    assert isolated(source).render(messages) == here.render(messages)


@pytest.mark.parametrize(
    ("source", "told"),
    [("{{ raise_exception('no') }}", "refused the messages: no"), ("{% for %}", "not valid Jinja")],
)
def test_its_errors_are_the_same(source: str, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        isolated(source).render(HELLO)
    with pytest.raises(ContextTooLong):
        isolated("{% for i in range(9) %}{{ 'x' * 999999 }}{% endfor %}").render(HELLO)


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_a_child_that_was_killed_or_stopped_is_replaced(kind: signal.Signals) -> None:
    process = RenderProcess()
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {}).isolated(process)
    assert template.render(HELLO) == "Hello"
    child: Any = process._children[0]
    os.kill(child._process.pid, kind)
    assert template.render(HELLO) == "Hello"
    assert process._children[0] is not child


def test_a_child_that_nobody_uses_serves_the_next() -> None:
    process = RenderProcess()
    assert process.render("one", {}) == "one"
    child = process._children[0]
    del process
    gc.collect()
    assert RenderProcess()._started() is child


def test_what_a_child_is_not_told() -> None:
    """It has none of the server's secrets, should a template get out of the sandbox."""
    os.environ["PENSTOCK_SECRET"] = "key"
    try:
        _spare.clear()  # it was started before
        process = RenderProcess()
        process.warm_up()
        child: Any = process._children[0]
        assert process.render("ready", {}) == "ready"
        assert b"PENSTOCK_SECRET" not in Path(f"/proc/{child._process.pid}/environ").read_bytes()
    finally:
        del os.environ["PENSTOCK_SECRET"]


def test_only_templates_that_come_with_penstock_are_trusted() -> None:
    assert all(isolated(source).process is None for source in TEMPLATES.values())
    assert isolated(TEMPLATES["chatml"] + " ").process is not None
