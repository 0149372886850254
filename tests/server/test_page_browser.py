"""What a reader sees of the page and does with it, in Chromium where there is one."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config
from penstock.engine.engine import Engine
from penstock.ipc.inprocess import InProcessClient
from penstock.ipc.spawn import ProcessClient
from penstock.model.load import load_text
from penstock.server import Setup, Space, create_app
from penstock.server.models.pool import ModelPool
from penstock.server.models.source import ModelSource
from tests.server import toys
from tests.server.browsing import MARKDOWN, ask, expect, last, told, visiting
from tests.server.conftest import Server, _serving

CALL = '<think>Hm.</think><tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
DOT = bytes.fromhex("47494638396101000100800100000000ffffff2c00000000010001000002024401003b")  # a GIF of one pixel
GIVEN = """([event, name, text]) => {
  const data = new DataTransfer();
  data.items.add(new File([text], name, {type: "text/plain"}));
  const given = event === "paste" ? new ClipboardEvent(event, {clipboardData: data, bubbles: true, cancelable: true})
    : new DragEvent(event, {dataTransfer: data, bubbles: true, cancelable: true});
  document.querySelector("#prompt").dispatchEvent(given);
}"""
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


# -- one answer ---------------------------------------------------------------------------------------------------


def test_markdown_is_shown_and_html_is_not(page: Any) -> None:
    ask(page, told(MARKDOWN))
    answer = last(page)
    expect(answer.locator("h3")).to_have_text("Title")
    expect(answer.locator("strong")).to_have_text("bold")
    expect(answer.locator("td")).to_have_text(["1", "2"])
    expect(answer.locator("pre .hljs-keyword").first).to_have_text("def")
    link = answer.locator("a", has_text="a link")
    assert link.get_attribute("href") == "https://example.org/x"
    assert "noopener" in link.get_attribute("rel")
    expect(answer.locator("img")).to_have_count(0)  # a picture from elsewhere is a link
    expect(answer.locator("a", has_text="Picture: x")).to_have_count(1)
    expect(answer).to_contain_text("<img src=x onerror=alert(1)>")
    expect(answer.locator("a", has_text="bad")).to_have_count(0)


def test_code_and_messages_are_copied(page: Any) -> None:
    ask(page, told(MARKDOWN))
    last(page).locator(".code").get_by_role("button", name="Copy").click()
    expect(page.locator("#notice")).to_have_text("Code copied")
    assert page.evaluate("navigator.clipboard.readText()") == "def f(): return 1"
    last(page).get_by_role("group", name="Message").get_by_role("button", name="Copy").click()
    expect(page.locator("#notice")).to_have_text("Message copied")
    assert page.evaluate("navigator.clipboard.readText()") == MARKDOWN


def test_code_is_copied_where_there_is_no_clipboard(page: Any) -> None:
    """A page from another machine that came over plain HTTP has none."""
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.locator("#snippet").get_by_role("button", name="Copy").click()
    page.click("#prompt")
    page.keyboard.press("Control+v")
    assert page.input_value("#prompt").startswith("curl http")


def test_two_chats_are_answered_at_once(page: Any, toy: Server) -> None:
    page.fill("#prompt", "[*abc]")
    page.keyboard.press("Enter")
    page.wait_for_selector("article.assistant .markdown p")
    page.click("#new")
    ask(page, "[meanwhile]")
    expect(last(page).locator(".markdown")).to_have_text("meanwhile")
    page.locator("#chats .chat", has_text="abc").click()
    page.click("#stop")
    expect(last(page).locator(".note")).to_contain_text("stopped")
    toy.until_idle()


def test_the_times_of_an_answer_are_explained(page: Any) -> None:
    ask(page, "[hello]")
    note = last(page).locator(".note")
    assert re.search(r"first token after \d+ ms · \d+ tokens(, \d+ a second)? · \d+ in the prompt", note.inner_text())
    note.get_by_role("button", name="Where did the time go?").click()
    assert re.search("(answer|prompt) took", note.inner_text())


def test_reasoning_and_tool_calls_are_folded_and_a_result_is_sent(page: Any) -> None:
    page.click("#show-settings")
    page.fill("#tools", json.dumps(TOOLS))
    ask(page, told(CALL))
    answer = last(page)
    reasoning = answer.locator("details.reasoning")
    assert reasoning.get_attribute("open") is None
    reasoning.locator("summary").click()
    expect(reasoning).to_contain_text("Hm.")
    expect(answer.locator("details.call summary")).to_contain_text("look")
    expect(answer.locator("details.call")).to_contain_text('"at": "sky"')
    answer.get_by_label("Result of look").fill("blue")
    answer.get_by_role("button", name="Send the result").click()
    expect(page.locator("article.tool")).to_contain_text("blue")
    expect(page.locator("article")).to_have_count(4)


def test_token_probabilities_on_demand(page: Any) -> None:
    ask(page, "[hi]")
    assert page.locator("details.chances").count() == 0
    page.get_by_role("button", name="Regenerate with token probabilities").click()
    chances = last(page).locator("details.chances")
    chances.locator("summary").click()
    chances.locator(".token").first.click()
    expect(chances.locator("table tr")).to_have_count(3)
    expect(chances.locator("tr.taken code")).to_have_text("h")


def test_an_answer_is_stopped_and_continued(page: Any, toy: Server) -> None:
    page.fill("#prompt", "[*abc]")
    page.keyboard.press("Enter")
    page.wait_for_selector("article.assistant .markdown p")
    page.keyboard.press("Escape")
    expect(last(page).locator(".note")).to_contain_text("stopped")
    toy.until_idle()
    before = len(last(page).locator(".markdown").inner_text())
    page.get_by_role("button", name="Continue").click()
    toy.until(lambda: len(last(page).locator(".markdown").inner_text()) > before + 20)
    page.click("#stop")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("article.assistant")).to_have_count(1)
    toy.until_idle()


def test_an_answer_that_repeated_itself_says_so_and_may_go_on(page: Any) -> None:
    page.click("#show-settings")
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "1300")
    ask(page, f"[{'ab' * 700}]")
    expect(last(page).locator(".ended")).to_contain_text("it repeated the same 2 tokens without end")
    expect(last(page).locator(".note")).not_to_contain_text("token limit")
    expect(last(page).locator(".markdown")).to_have_text("ab" * 512)
    expect(page.get_by_role("button", name="Continue")).to_have_count(0)  # it would only repeat itself again
    last(page).get_by_role("button", name="Regenerate and let it repeat").click()
    expect(last(page).locator(".place")).to_have_text("2 / 2")
    expect(last(page).locator(".note")).to_contain_text("cut at the token limit")
    expect(last(page).locator(".markdown")).to_have_text("ab" * 650)
    expect(last(page).locator(".ended")).to_have_count(0)


def test_an_error_is_shown_and_the_next_message_goes_through(page: Any) -> None:
    page.click("#show-settings")
    page.fill("#schema", "{not json")
    page.fill("#prompt", "[hello]")
    page.click("#send")
    expect(page.locator("article .error")).to_contain_text("is not JSON")
    page.fill("#schema", "")
    last(page).get_by_role("button", name="Regenerate", exact=True).click()
    expect(last(page).locator(".markdown")).to_have_text("hello")


def test_files_go_as_text_and_pictures_only_to_models_that_see(page: Any, toy: Server) -> None:
    page.set_input_files("#files", {"name": "note.txt", "mimeType": "text/plain", "buffer": b"[from the file]"})
    expect(page.locator(".attached")).to_contain_text("note.txt")
    page.set_input_files("#files", {"name": "x.png", "mimeType": "image/png", "buffer": b"\x89PNG"})
    expect(page.locator("#notice")).to_contain_text("cannot see pictures")
    ask(page, "What does it say?")
    expect(last(page).locator(".markdown")).to_have_text("from the file")


@pytest.mark.parametrize("event", ["paste", "drop"])
def test_a_file_is_pasted_or_dropped(page: Any, event: str) -> None:
    page.evaluate(GIVEN, [event, "note.txt", "[from the file]"])
    expect(page.locator(".attached")).to_contain_text("note.txt")
    page.evaluate(GIVEN, [event, "other.txt", "[not this]"])
    page.get_by_role("button", name="Remove other.txt").click()
    ask(page, "What does it say?")
    expect(last(page).locator(".markdown")).to_have_text("from the file")
    expect(page.locator("article.user details summary")).to_have_text("File: note.txt")


def test_a_model_that_sees_gets_pictures(browser: Any, toy: Server) -> None:
    """No model of this server sees yet: its answers are this test's."""
    sent: list[dict[str, Any]] = []

    def answer(route: Any) -> None:
        sent.append(route.request.post_data_json)
        chunk = {"choices": [{"delta": {"content": "a dot"}, "finish_reason": "stop"}]}
        route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")

    with visiting(browser, toy.url) as page:
        page.route("**/props?*", lambda route: route.fulfill(json={"modalities": {"vision": True}}))
        page.route("**/v1/chat/completions", answer)
        page.reload()
        page.get_by_role("button", name="Attach files or pictures").wait_for()
        page.set_input_files("#files", {"name": "x.gif", "mimeType": "image/gif", "buffer": DOT})
        page.fill("#prompt", "What is this?")
        page.keyboard.press("Enter")
        expect(last(page).locator(".markdown")).to_have_text("a dot")
        expect(page.locator("article.user img")).to_have_attribute("alt", "x.gif")
    picture, text = sent[0]["messages"][0]["content"]
    assert picture["image_url"]["url"] == f"data:image/gif;base64,{base64.b64encode(DOT).decode()}"
    assert text == {"type": "text", "text": "What is this?"}


def test_settings_go_with_the_request(page: Any, toy: Server) -> None:
    page.click("#show-settings")
    page.select_option("#preset", "Precise")
    expect(page.locator("#temperature")).to_have_value("0")
    page.fill("#system", "Say [this]")
    page.fill("#max_tokens", "2")
    ask(page, "anything")
    expect(last(page).locator(".markdown")).to_have_text("th")
    expect(last(page).locator(".note")).to_contain_text("cut at the token limit")
    page.on("dialog", lambda dialog: dialog.accept("Mine"))
    page.click("#save-preset")
    page.reload()
    page.click("#show-settings")
    page.select_option("#preset", "Default")
    expect(page.locator("#max_tokens")).to_have_value("")
    page.select_option("#preset", "Mine")
    expect(page.locator("#max_tokens")).to_have_value("2")
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator("#preset option", has_text="Mine")).to_have_count(0)
    page.reload()
    page.click("#show-settings")
    expect(page.locator("#preset option")).to_have_text(["Choose…", "Default", "Precise", "Creative", "Programmer"])


def test_the_looks_are_chosen_and_kept(page: Any) -> None:
    page.click("#show-settings")
    seen = []
    for theme in ("light", "dark"):
        page.select_option("#theme", theme)
        page.reload()
        page.click("#show-settings")
        expect(page.locator("#theme")).to_have_value(theme)
        seen.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(set(seen)) == 2
    page.select_option("#theme", "auto")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == seen[0]  # as the system of the tests


# -- branches and history -----------------------------------------------------------------------------------------


def test_regenerating_and_editing_make_branches(page: Any) -> None:
    ask(page, "[one]")
    last(page).get_by_role("button", name="Regenerate", exact=True).click()
    expect(last(page).locator(".place")).to_have_text("2 / 2")
    mine = page.locator("article.user")
    mine.hover()
    mine.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").fill("[two]")
    page.get_by_role("button", name="Send as a branch").click()
    expect(last(page).locator(".markdown")).to_have_text("two")
    mine.get_by_role("button", name="Previous branch").click()
    expect(last(page).locator(".markdown")).to_have_text("one")
    expect(last(page).locator(".place")).to_have_text("2 / 2")
    last(page).get_by_role("button", name="Branch into a new chat").click()
    expect(page.locator("#chats .chat")).to_have_count(2)
    last(page).get_by_role("button", name="Delete from here").click()
    expect(page.locator("article")).to_have_count(1)


def test_chats_are_kept_searched_and_deleted(page: Any) -> None:
    for word in ("alpha", "beta"):
        page.click("#new")
        ask(page, f"[{word} answer]")
    page.wait_for_timeout(400)  # a chat is kept a little later
    page.reload()
    chats = page.locator("#chats .chat")
    expect(chats).to_have_count(2)
    page.fill("#search", "alpha answ")
    expect(chats).to_have_count(1)
    chats.click()
    expect(last(page).locator(".markdown")).to_have_text("alpha answer")
    expect(page.locator("#prompt")).to_be_focused()  # a moment after the chat opens
    page.fill("#search", "gamma")
    expect(page.locator("#chats .empty")).to_have_text("No chat has these words.")
    page.fill("#search", "")
    page.on("dialog", lambda dialog: dialog.accept())
    page.locator(".menu summary").first.click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(chats).to_have_count(1)


def test_chats_are_exported_and_imported(page: Any, tmp_path: Path) -> None:
    ask(page, "[kept]")
    last(page).get_by_role("button", name="Regenerate", exact=True).click()
    expect(last(page).locator(".place")).to_have_text("2 / 2")
    with page.expect_download() as saving:
        page.click("#export")
    file = tmp_path / "chats.json"
    saving.value.save_as(file)
    before = json.loads(file.read_text())
    page.on("dialog", lambda dialog: dialog.accept())
    page.locator(".menu summary").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator("#chats .chat")).to_have_count(0)
    page.set_input_files("#import-file", file)
    page.locator("#chats .chat").click()
    expect(last(page).locator(".place")).to_have_text("2 / 2")
    with page.expect_download() as saving:
        page.click("#export")
    saving.value.save_as(file)
    assert json.loads(file.read_text()) == before
    before["chats"][0]["messages"] = {"a": {"role": "assistant", "files": 5, "calls": [None]}}
    before["chats"][0] |= {"title": "Broken", "chosen": {"root": "a", "a": "a"}}
    file.write_text(json.dumps(before))
    page.set_input_files("#import-file", file)
    page.locator("#chats .chat", has_text="Broken").click()
    expect(page.locator("#messages")).to_have_text("This message cannot be shown.")
    file.write_text("{}")
    page.set_input_files("#import-file", file)
    expect(page.locator("#notice")).to_contain_text("this file has no chats")


def test_a_chat_is_renamed_and_exported_as_markdown(page: Any, tmp_path: Path) -> None:
    ask(page, told("Some **bold** text"))
    page.on("dialog", lambda dialog: dialog.accept("About the sky"))
    page.locator(".menu summary").click()
    page.get_by_role("button", name="Rename").click()
    expect(page.locator("#chats .chat")).to_have_text("About the sky")
    page.locator(".menu summary").click()
    with page.expect_download() as saving:
        page.get_by_role("button", name="Export as Markdown").click()
    assert saving.value.suggested_filename == "chat.md"
    saving.value.save_as(tmp_path / "chat.md")
    written = (tmp_path / "chat.md").read_text()
    assert written.startswith("# About the sky\n")
    assert written.rstrip().endswith("Some **bold** text")


# -- the engine ---------------------------------------------------------------------------------------------------


def test_the_engine_view_moves(page: Any, toy: Server) -> None:
    page.fill("#prompt", "[*abc]")
    page.keyboard.press("Enter")
    page.wait_for_selector("article.assistant .markdown p")
    page.click("#show-engine")
    expect(page.locator("#requests .phase")).to_have_text("decode")
    expect(page.locator("#running")).to_have_text("1")
    expect(page.locator("#cache")).to_contain_text("cached for reuse")
    expect(page.locator("#plot")).to_have_attribute("points", re.compile(r"\d+,\d+"))
    assert page.locator(".answer-bar").count() > 10
    page.keyboard.press("Escape")
    expect(page.locator("#running")).to_have_text("0")
    page.locator("#recent summary").first.click()
    expect(page.locator("#recent")).to_contain_text("first token after")
    expect(page.locator("#ttft")).to_contain_text("ms")


def open_late() -> Engine:
    time.sleep(1)
    return toys.open_parrot()


@contextmanager
def serving_two(folder: Path) -> Iterator[Server]:
    clients = {name: InProcessClient(open_late, name) for name in ("toy/one", "toy/two")}
    sources = [ModelSource(name, partial(clients.get, name), toys.ToyText) for name in clients]  # type: ignore[arg-type]
    app = create_app(ModelPool(sources), Setup(space=Space(folder)))
    yield from _serving(clients["toy/one"], app)


def test_a_model_that_is_not_loaded_shows_its_loading(browser: Any, tmp_path: Path) -> None:
    with serving_two(tmp_path) as server, visiting(browser, server.url) as page:
        expect(page.locator("#model")).to_have_value("toy/one")
        expect(page.locator("#model option").nth(1)).to_have_text("toy/two (stored)")
        page.select_option("#model", "toy/two")
        expect(page.locator("#loading progress")).to_be_visible()
        expect(page.locator("#notice")).to_have_text("toy/two is loaded")
        expect(page.locator("#model option").nth(1)).to_have_text("toy/two")
        ask(page, "[from two]")
        expect(last(page).locator("h2")).to_have_text("toy/two")


def test_a_real_model_answers(browser: Any, smollm2: Path, serve: Callable[..., Any]) -> None:
    config = Config(model=str(smollm2), name="smollm2", max_len=2048, max_rows=4)
    serves = serve(ProcessClient(config), load_text(smollm2), "smollm2")
    with serves as server, visiting(browser, server.url) as page:
        page.click("#show-settings")
        page.fill("#max_tokens", "48")
        page.fill("#temperature", "0")
        page.click("#show-settings")
        ask(page, "Why is the sky blue?")
        expect(last(page).locator(".markdown")).to_contain_text("scatter")
        page.click("#show-engine")
        expect(page.locator("#running")).to_have_text("0")
