"""The page at `/`: a chat and the server's load, in one file that asks for nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from importlib import resources

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

DOCUMENT = resources.files("hookline.serving").joinpath("web", "index.html")


def make_web_router() -> APIRouter:
    """The route `/`. It needs no key: the page asks its reader for one, and sends it with what it fetches."""
    document = DOCUMENT.read_bytes()
    headers = document_headers(document)
    router = APIRouter(default_response_class=Response)

    @router.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        """The page."""
        return Response(document, media_type="text/html", headers=headers)

    return router


def document_headers(document: bytes) -> Mapping[str, str]:
    """Headers under which only the page's own script and style work, and only this server can be asked.

    The text of each is allowed by its hash; see https://www.w3.org/TR/CSP3/.
    """
    policy = {
        "default-src": "'none'",
        "script-src": _hash_of(document, b"script"),
        "style-src": _hash_of(document, b"style"),
        "connect-src": "'self'",
        "img-src": "data:",  # the empty icon, without which a browser asks for one
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "cache-control": "no-cache",
        "cross-origin-opener-policy": "same-origin",
    }


def _hash_of(document: bytes, tag: bytes) -> str:
    """What allows the one element `tag` of the page."""
    [text] = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), document, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
