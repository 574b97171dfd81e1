"""The live page's files: complete, small, open, and fenced in."""

import re

import httpx
import pytest

from etserve.server.edge import OPEN_PATHS
from etserve.server.static_page import FOLDER, PAGE_FILES
from tests.server.helpers import call

KEYS = {"api_keys": ("key-of-anna-1234",)}
MAX_BYTES = 60_000


def test_every_file_is_served_and_no_other() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(PAGE_FILES.values())
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < MAX_BYTES
    assert {"/health/live", "/health/ready", *PAGE_FILES} == OPEN_PATHS
    for path in ("/page/../app.py", "/page/%2e%2e/app.py", "/page/index.html", "/page/app.js/", "/page/app.js%00"):
        assert call("GET", path).status_code == 404


@pytest.mark.parametrize("path", PAGE_FILES)
def test_a_file_needs_no_key_and_is_fenced_in(path: str) -> None:
    reply = call("GET", path, config=KEYS)
    assert reply.status_code == 200
    assert reply.content == (FOLDER / PAGE_FILES[path]).read_bytes()
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert set(re.findall(r"(?:script|style|img|connect)-src ([^;]*)", policy)) == {"'self'"}
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["cache-control"] == "no-cache"
    kinds = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "html": "text/html"}
    assert reply.headers["content-type"].startswith(kinds[PAGE_FILES[path].rsplit(".", 1)[1]])


def test_a_file_that_has_not_changed_is_not_sent_again() -> None:
    first = call("GET", "/page/app.js")
    again = call("GET", "/page/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"] != call("GET", "/").headers["etag"]
    assert call("GET", "/page/app.js", headers={"if-none-match": '"other"'}).status_code == 200


def test_the_page_refers_to_its_own_files_only_and_has_no_inline_code() -> None:
    reply: httpx.Response = call("GET", "/")
    html = reply.text
    assert set(re.findall(r'(?:src|href)="([^"#]+)"', html)) <= set(PAGE_FILES)
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script[^>]*>[^<]", html)
    for name in PAGE_FILES.values():
        text = (FOLDER / name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text
        assert "innerHTML" not in text
        for imported in re.findall(r'from "(.*?)"', text):
            assert f"/page/{imported.removeprefix('./')}" in PAGE_FILES
