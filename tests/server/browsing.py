"""A browser for the tests of the page: the machine's own Chromium, which asks nothing but the page's server."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
FLAGS += ["--disable-sync"]
REQUIRED = os.environ.get("PENSTOCK_BROWSER") == "required"  # a skip would be a failure
AXE = Path(__file__).parents[2] / "page" / "node_modules" / "axe-core" / "axe.min.js"
SLOW = 30_000  # milliseconds that something may take on a busy machine
VIOLATIONS = """
window.violations = [];
document.addEventListener("securitypolicyviolation", event => window.violations.push(event.violatedDirective));
"""

MODEL = "toy/parrot"
MARKDOWN = """# Title
Some **bold** text, `code` and [a link](https://example.org/x).

| a | b |
|---|---|
| 1 | 2 |

```python
def f(): return 1
```
![x](https://example.org/x.png) <img src=x onerror=alert(1)> [bad](javascript:alert(1))"""


def missing(what: str) -> Any:
    return pytest.fail(what) if REQUIRED else pytest.skip(what)


@contextmanager
def browsing() -> Iterator[Any]:
    """Yields a browser; skips the test where there is none."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("there is no Playwright here: pip install 'penstock[browser]'")
    if CHROMIUM is None:
        missing("there is no Chromium here: apt-get install chromium")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def visiting(browser: Any, url: str, **settings: Any) -> Iterator[Any]:
    """Yields the page at `url` in a browser profile of its own. Fails if the page has errors that are not taken from
    `page.errors`, breaks its content security policy or asks another server for anything."""
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **settings})
    context.add_init_script(VIOLATIONS)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.set_default_timeout(SLOW)
    page.errors, outside = [], []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("console", lambda message: page.errors.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: outside.append(request.url))
    page.goto(url)
    yield page
    violations = page.evaluate("window.violations")
    context.close()
    assert page.errors == []
    assert violations == []
    assert [each for each in outside if not each.startswith((f"{url}/", "data:", "blob:"))] == []


def expect(locator: Any) -> Any:
    from playwright.sync_api import expect

    expect.set_options(timeout=SLOW)
    return expect(locator)


def told(text: str) -> str:
    """Returns a message that the parrot answers with a text of any characters."""
    return f"[={text.encode().hex()}]"


def ask(page: Any, text: str) -> None:
    """Sends a message and waits for the whole answer."""
    page.fill("#prompt", text)
    page.keyboard.press("Enter")
    page.wait_for_selector("article.assistant:last-of-type .note .figures")


def last(page: Any) -> Any:
    return page.locator("article.assistant").last
