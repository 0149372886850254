"""Serves the page at /: a chat and a view of the engine, in one file that loads nothing else."""

from __future__ import annotations

import base64
import gzip
import hashlib
from functools import cache
from importlib.resources import files

from starlette.responses import HTMLResponse, Response

PAGE = files("penstock.server").joinpath("page.html").read_text("utf-8")


def allowed_hash(page: str, tag: str) -> str:
    """Returns the hash by which a content security policy allows the one inline script or style."""
    inside = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"


HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors 'none'; script-src {allowed_hash(PAGE, 'script')}; style-src {allowed_hash(PAGE, 'style')}"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    "vary": "accept, accept-encoding",
}


@cache
def compressed() -> bytes:
    return gzip.compress(PAGE.encode(), mtime=0)


def page(encodings: str) -> Response:
    """Returns the page, compressed if that is among the encodings which the browser accepts."""
    if "gzip" in encodings:
        return HTMLResponse(compressed(), headers=HEADERS | {"content-encoding": "gzip"})
    return HTMLResponse(PAGE, headers=HEADERS)
