"""The live page's files. They carry no data and need no key; what they show is asked for with one."""

import hashlib
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response

FOLDER: Final = Path(__file__).parent / "page"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Every path that is served, by name: nothing else in the folder, or out of it, can be asked for.
PAGE_FILES: Final = {
    "/": "index.html",
    "/page/style.css": "style.css",
    "/page/icon.svg": "icon.svg",
    "/page/app.js": "app.js",
    "/page/api.js": "api.js",
    "/page/controls.js": "controls.js",
    "/page/draw.js": "draw.js",
    "/page/engine.js": "engine.js",
    "/page/run.js": "run.js",
    "/page/tokens.js": "tokens.js",
}
# No inline script or style, nothing from elsewhere, no framing by another page.
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # kept by the browser, asked about each time: a new version shows at once
}
router = APIRouter(redirect_slashes=False)


@cache
def _load(name: str) -> tuple[bytes, str]:
    """A file's bytes and its entity tag."""
    content = (FOLDER / name).read_bytes()
    return content, f'"{hashlib.sha256(content).hexdigest()[:32]}"'


def _answer(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        content, tag = _load(name)
        headers = {**_HEADERS, "etag": tag}
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=_TYPES[Path(name).suffix])

    return answer


for _path, _name in PAGE_FILES.items():
    router.add_api_route(_path, _answer(_name), methods=["GET"], include_in_schema=False)
