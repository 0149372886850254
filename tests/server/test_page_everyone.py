"""The page for everyone: by keyboard, on a phone, for screen readers, with a key, and what its first paint takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.ipc.inprocess import InProcessClient
from penstock.keys import Key, changing, digest, new_key, now
from penstock.server.access.guard import Rules
from tests.server import toys
from tests.server.browsing import AXE, MARKDOWN, MODEL, ask, expect, last, missing, told, visiting
from tests.server.conftest import Server, serving
from tests.server.test_page import MOST, MOST_SENT

PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 640}, "has_touch": True, "is_mobile": True}
PAINTED = """() => new Promise(resolve => new PerformanceObserver(list => {
    for (const entry of list.getEntriesByName("first-contentful-paint")) resolve(entry.startTime);
}).observe({type: "paint", buffered: true}))"""


def serious(page: Any) -> list[str]:
    """Returns what axe finds serious or worse."""
    if not AXE.exists():
        missing("there is no axe-core here: run `npm ci` in page/")
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run()")["violations"]
    return [f"{each['id']}: {each['nodes'][0]['html']}" for each in found if each["impact"] in ("serious", "critical")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Any, toy: Server, scheme: str) -> None:
    with visiting(browser, toy.url, color_scheme=scheme) as page:
        expect(page.locator("#model")).to_have_value(MODEL)
        assert serious(page) == []
        page.click("#show-settings")
        page.check("#chances")
        assert serious(page) == []
        page.click("#show-settings")
        ask(page, told(MARKDOWN))
        page.get_by_role("button", name="Where did the time go?").click()
        page.locator("details.chances summary").click()
        assert serious(page) == []
        page.click("#show-engine")
        page.wait_for_selector("#recent")
        assert serious(page) == []
        page.keyboard.press("Alt+h")
        expect(page.locator("#help")).to_be_visible()
        assert serious(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_what_opens(browser: Any, toy: Server, scheme: str) -> None:
    with visiting(browser, toy.url, color_scheme=scheme) as page:
        page.click("#show-settings")
        page.fill("#temperature", "0")
        page.click("#show-settings")
        ask(page, f"[{'ab' * 600}]")
        last(page).locator(".ended").wait_for()
        assert serious(page) == []
        page.keyboard.press("ArrowUp")
        page.get_by_label("Edited message").wait_for()
        assert serious(page) == []
        page.keyboard.press("Escape")
        page.locator(".menu summary").click()
        page.get_by_role("button", name="Rename").wait_for()
        assert serious(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_on_a_phone(browser: Any, toy: Server, scheme: str) -> None:
    with visiting(browser, toy.url, color_scheme=scheme, **PHONE) as page:
        ask(page, told(MARKDOWN))
        assert serious(page) == []
        page.get_by_role("button", name="Chats", exact=True).click()
        expect(page.locator("#search")).to_be_visible()
        assert serious(page) == []
        page.get_by_role("button", name="Close the list").click()
        page.click("#show-engine")
        page.wait_for_selector("#recent")
        assert serious(page) == []


def test_the_keyboard_is_enough(page: Any) -> None:
    page.keyboard.type("[first]")
    page.keyboard.press("Enter")
    expect(last(page).locator(".markdown")).to_have_text("first")
    expect(page.locator("#send")).to_be_visible()
    page.keyboard.press("ArrowUp")
    expect(page.get_by_label("Edited message")).to_be_focused()
    page.keyboard.press("Control+a")
    page.keyboard.type("[second]")
    page.keyboard.press("Control+Enter")
    expect(last(page).locator(".markdown")).to_have_text("second")
    expect(page.locator("#send")).to_be_visible()
    page.keyboard.press("Alt+r")
    expect(last(page).locator(".place")).to_have_text("2 / 2")
    expect(page.locator("#send")).to_be_visible()
    page.keyboard.press("Alt+ArrowLeft")
    expect(last(page).locator(".place")).to_have_text("1 / 2")
    page.keyboard.press("Alt+c")
    expect(page.locator("#notice")).to_have_text("Answer copied")
    page.keyboard.press("Alt+k")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.press("Alt+e")
    expect(page.locator("#engine")).to_be_visible()
    page.keyboard.press("Alt+n")
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.press("Alt+s")
    expect(page.locator("#settings")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#settings")).to_have_count(0)


def test_it_fits_a_phone(browser: Any, toy: Server) -> None:
    with visiting(browser, toy.url, **PHONE) as page:
        expect(page.locator("#prompt")).to_be_visible()
        ask(page, told(MARKDOWN))
        for view in ("#show-engine", "#show-chat", "#show-settings"):
            page.click(view)
            assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.get_by_role("button", name="Close the settings").click()
        expect(page.locator("#search")).to_be_hidden()
        page.get_by_role("button", name="Chats", exact=True).click()
        expect(page.locator("#search")).to_be_visible()
        page.click("#new")
        expect(page.locator(".welcome")).to_be_visible()


def test_the_first_screen_has_examples_and_snippets(page: Any, toy: Server) -> None:
    expect(page.locator(".example")).to_have_count(4)
    expect(page.locator("#snippet")).to_contain_text(f"curl {toy.url}/v1/chat/completions")
    for name in ("OpenAI SDK", "Anthropic SDK", "Ollama", "Coding agents"):
        page.get_by_role("tab", name=name).click()
        expect(page.locator("#snippet")).to_contain_text(toy.url)
    page.get_by_role("tab", name="OpenAI SDK").click()
    page.locator("#snippet").get_by_role("button", name="Copy").click()
    expect(page.locator("#notice")).to_have_text("Code copied")
    said: list[str] = []
    exec(page.evaluate("navigator.clipboard.readText()"), {"print": said.append})  # it runs as it is
    assert said == [""]  # the parrot is told to say nothing


def test_a_key_is_asked_for_and_kept(browser: Any, tmp_path: Path) -> None:
    file, secret = tmp_path / "keys.json", new_key()
    with changing(file) as keys:
        keys.append(Key(name="reader", sha256=digest(secret.encode()), created=now()))
    client = InProcessClient(toys.open_parrot, "parrot")
    serves = serving(client, toys.ToyText(), MODEL, rules=Rules(keys=file))
    with serves as server, visiting(browser, server.url) as page:
        page.locator("#wanted #key").wait_for()
        assert serious(page) == []
        page.fill("#wanted #key", secret)
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_have_value(MODEL)
        expect(page.locator("#wanted")).to_have_count(0)
        page.reload()
        expect(page.locator("#model")).to_have_value(MODEL)
        ask(page, "[hello]")
        expect(last(page).locator(".markdown")).to_have_text("hello")
        refusals = [error for error in page.errors if "401" in error]
        assert len(refusals) == 2  # the models and the engine, once each; then it waits for a key
        page.errors[:] = [error for error in page.errors if error not in refusals]


def test_the_first_paint_takes_the_document_alone(browser: Any, toy: Server) -> None:
    """Every other request is refused here: the browser paints all the same."""
    with visiting(browser, toy.url) as page:
        expect(page.locator("#model")).to_have_value(MODEL)
        page.route("**/*", lambda route: route.continue_() if route.request.is_navigation_request() else route.abort())
        page.reload()
        assert page.evaluate(PAINTED) > 0
        expect(page.locator(".welcome")).to_be_visible()
        (document,) = page.evaluate("performance.getEntriesByType('navigation').map(each => each.toJSON())")
        assert 0 < document["encodedBodySize"] <= MOST_SENT < document["decodedBodySize"] <= MOST
        refused = [error for error in page.errors if "ERR_FAILED" in error]
        page.errors[:] = [error for error in page.errors if error not in refused]
