"""The page at /: what it may load, and, where there is a Chromium, what a reader sees of it."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config
from penstock.ipc.inprocess import InProcessClient
from penstock.ipc.spawn import ProcessClient
from penstock.keys import Key, changing, digest, new_key, now
from penstock.model.load import load_text
from penstock.server.access.guard import Rules
from tests.server import toys
from tests.server.conftest import Server

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def test_the_page_asks_for_nothing_else(parrot: Server) -> None:
    answer = parrot.http.get("/", headers={"accept": "text/html,*/*;q=0.8"})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r"https?://|@import|<(script|link|img)[^>]+(src|href)=\"(?!data:)", answer.text)


@pytest.mark.parametrize("tag", ["script", "style"])
def test_only_its_own_code_may_run(parrot: Server, tag: str) -> None:
    answer = parrot.http.get("/", headers={"accept": "text/html,*/*;q=0.8"})
    (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'"


@pytest.fixture(scope="module")
def smollm2_server(smollm2: Path, serve: Callable[..., Any]) -> Iterator[Server]:
    config = Config(model=str(smollm2), name="smollm2", max_len=2048, max_rows=4)
    with serve(ProcessClient(config), load_text(smollm2), "smollm2") as server:
        yield server


@pytest.fixture
def page(smollm2_server: Server) -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="pip install 'penstock[browser]'")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 720})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(smollm2_server.url)
        page.expect = api.expect
        page.errors = errors
        yield page
        browser.close()
        assert errors == []


def test_a_message_streams_and_the_figures_move(page: Any, smollm2_server: Server) -> None:
    seen = page.expect
    seen(page.locator("#model")).to_have_value("smollm2")
    page.fill("#max_tokens", "48")
    page.fill("#temperature", "0")
    page.fill("#prompt", "Why is the sky blue?")
    page.keyboard.press("Enter")
    page.wait_for_selector("article.assistant p:not(:empty)")
    page.wait_for_selector("article.assistant .note")
    assert "scatter" in page.inner_text("article.assistant p")
    assert re.search(r"first token after \d+ ms · \d+ tokens, \d+ a second", page.inner_text("article.assistant .note"))
    seen(page.locator("#running")).to_have_text("0")
    seen(page.locator("#ttft")).to_contain_text("ms")
    seen(page.locator("#cache")).to_contain_text("kept for later")
    seen(page.locator("#plot")).to_have_attribute("points", re.compile(r"\d+,\d+"))


def test_an_answer_is_stopped_by_key_and_the_engine_is_free(page: Any, smollm2_server: Server) -> None:
    page.fill("#prompt", "Write a very long story about a river, chapter after chapter.")
    page.keyboard.press("Enter")
    page.wait_for_selector("article.assistant p:not(:empty)")
    page.keyboard.press("Escape")
    page.wait_for_selector("article.assistant .note")
    assert "stopped" in page.inner_text("article.assistant .note")
    assert page.is_enabled("#send")
    smollm2_server.until_idle()


def test_an_error_is_shown_and_the_next_message_goes_through(page: Any) -> None:
    page.fill("#schema", "{not json")
    page.fill("#prompt", "Hello")
    page.click("#send")
    page.wait_for_selector("article.error p:not(:empty)")
    page.fill("#schema", "")
    page.fill("#max_tokens", "4")
    page.fill("#prompt", "Hello again")
    page.click("#send")
    page.wait_for_selector("article.assistant .note")


def test_it_fits_a_phone(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 640})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.is_visible("#prompt")
    assert page.is_visible("#send")


def test_a_key_is_asked_for_and_kept(page: Any, serve: Callable[..., Any], tmp_path: Path) -> None:
    file, secret = tmp_path / "keys.json", new_key()
    with changing(file) as keys:
        keys.append(Key(name="reader", sha256=digest(secret.encode()), created=now()))
    client = InProcessClient(toys.open_parrot, "parrot")
    with serve(client, toys.ToyText(), "toy/parrot", rules=Rules(keys=file)) as server:
        seen = page.expect
        page.goto(server.url)
        page.wait_for_selector("#wanted:not([hidden])")
        page.fill("#key", secret)
        page.keyboard.press("Enter")
        seen(page.locator("#model")).to_have_value("toy/parrot")
        seen(page.locator("#wanted")).to_be_hidden()
        page.reload()
        seen(page.locator("#model")).to_have_value("toy/parrot")
        page.fill("#prompt", "[hello]")
        page.click("#send")
        page.wait_for_selector("article.assistant .note")
        assert page.inner_text("article.assistant p") == "hello"
        seen(page.locator("#running")).to_have_text("0")
        page.goto("about:blank")
    refusals = [error for error in page.errors if "401" in error]
    assert len(refusals) == 2  # the models and the figures, once each; then it waits for a key
    page.errors[:] = [error for error in page.errors if error not in refusals]
