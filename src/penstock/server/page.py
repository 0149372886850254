"""The page at /: a chat and a view of the engine, in one file that asks for nothing else."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from penstock.server.served_model import ServedModel

PAGE = files("penstock.server").joinpath("page.html").read_text("utf-8")


def allowed_hash(page: str, tag: str) -> str:
    """What a content security policy calls the one inline script or style."""
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
}


async def page(_: ServedModel, __: Request) -> Response:
    return HTMLResponse(PAGE, headers=HEADERS)
