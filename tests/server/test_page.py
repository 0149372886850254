"""The page at /: what it may load, how large it is, and that it is what its source gives."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest

from penstock.server.status.page import PAGE
from tests.server.conftest import Server

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "page"
HTML = {"accept": "text/html,*/*;q=0.8"}
MOST = 300_000  # bytes
MOST_SENT = 100_000  # bytes that a browser waits for before it can paint


def test_the_page_asks_for_nothing_else(parrot: Server) -> None:
    answer = parrot.http.get("/", headers=HTML)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    bare = re.sub(r"<!--.*?-->|<script>.*?</script>", "", answer.text, flags=re.DOTALL)
    assert not re.search(r"@import|url\(|<(script|link|img|iframe)[^>]+(src|href)=\"(?!data:)", bare)
    policy = answer.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "connect-src 'self'; img-src data:;" in policy


@pytest.mark.parametrize("tag", ["script", "style"])
def test_only_its_own_code_may_run(parrot: Server, tag: str) -> None:
    answer = parrot.http.get("/", headers=HTML)
    (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'"


def test_the_page_is_small(parrot: Server) -> None:
    assert len(PAGE.encode()) <= MOST
    answer = parrot.http.get("/", headers=HTML | {"accept-encoding": "gzip, br"})
    assert answer.headers["content-encoding"] == "gzip"
    assert int(answer.headers["content-length"]) <= MOST_SENT
    plain = parrot.http.get("/", headers=HTML | {"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert answer.text == plain.text == PAGE


def test_the_page_was_built_from_this_source() -> None:
    """scripts/check_page.sh builds it again, and compares every byte."""
    names = ["build.mjs", "package-lock.json", "tsconfig.json", *(f"src/{path.name}" for path in SOURCE.glob("src/*"))]
    digest = hashlib.sha256()
    for name in sorted(names):
        digest.update(f"{name}\0".encode() + (SOURCE / name).read_bytes() + b"\0")
    assert f"Its source is {digest.hexdigest()}." in PAGE, "run `npm run build` in page/"


def test_the_lock_file_names_no_registry() -> None:
    assert '"resolved"' not in (SOURCE / "package-lock.json").read_text()


def test_the_page_has_the_licences_of_what_is_in_it() -> None:
    for package in ("preact", "marked", "lowlight", "highlight.js"):
        assert re.search(rf"^{re.escape(package)} \d+\.\d+\.\d+ \((MIT|BSD-3-Clause)\)$", PAGE, re.MULTILINE)
    assert PAGE.count("Permission is hereby granted") == 3
    assert "Redistribution and use in source and binary forms" in PAGE
