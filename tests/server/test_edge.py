"""Hosts, keys, sizes, content types, ids: what the outermost layer lets in and how it refuses."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from etserve.config import ServerConfig
from etserve.errors import ConfigError
from etserve.server.app import create_app
from etserve.server.auth import ApiKeys, cache_salt, load_keys
from etserve.server.edge import OPEN_PATHS
from etserve.server.routes import ROUTERS
from tests.fakes import FakeEngine
from tests.server.helpers import call, chat, client_of, complete, make_app

KEY, OTHER_KEY = "key-of-anna-1234", "key-of-boris-5678"
ROUTES = sorted({route.path for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)})
KEYS = {"api_keys": (KEY, OTHER_KEY)}
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "BREW")
JSON = {"content-type": "application/json"}


def error_of(reply: httpx.Response) -> dict[str, Any]:
    body = reply.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("method", METHODS)
def test_every_route_needs_a_key_unless_it_is_one_of_the_open_ones(path: str, method: str) -> None:
    reply = call(method, path.replace("{model_id:path}", "unit"), config=KEYS)
    if path in OPEN_PATHS:
        assert reply.status_code == (200 if method == "GET" else 405)
    else:
        assert reply.status_code == 401
        assert reply.headers["www-authenticate"] == "Bearer"
        if method != "HEAD":
            assert error_of(reply)["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    "path",
    ["/page", "/page/", "/health/live/", "/health%2flive/x", "/x", "/health/live%00", "/HEALTH/LIVE", "/docs",
     "/openapi.json", "/redoc", "/page/x.js", "/index.html"],
)  # fmt: skip
def test_a_path_that_only_looks_open_needs_a_key(path: str) -> None:
    assert call("GET", path, config=KEYS).status_code == 401
    assert call("GET", path).status_code in (404, 405)


@pytest.mark.parametrize(
    "host",
    ["a/health/live", "127.0.0.1/health/live?", "a?", "a#", "a/../", "user@127.0.0.1", "a b", "", "a,b", "a\\b",
     "127.0.0.1:x", "127.0.0.1:123456", "[::1", "::1", "é.example", "a%2f", "x" * 300, "-a"],
)  # fmt: skip
def test_a_host_that_is_no_host_is_refused_and_never_opens_a_route(host: str) -> None:
    for config in (KEYS, {}):
        headers = httpx.Headers([("host", host)], encoding="latin-1")
        reply = call("GET", "/v1/models", config=config, headers=headers)
        assert reply.status_code == 400
        assert error_of(reply)["code"] == "invalid_host"


def test_a_web_page_cannot_reach_a_keyless_local_server_by_rebinding_its_name() -> None:
    assert call("GET", "/version", headers={"host": "evil.example"}).status_code == 400
    for host in ("localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000"):
        assert call("GET", "/version", headers={"host": host}).status_code == 200


def test_another_loopback_address_answers_to_its_own_name() -> None:
    assert call("GET", "/version", config={"host": "127.1.2.3"}, headers={"host": "127.1.2.3:80"}).status_code == 200
    assert call("GET", "/version", config={"host": "127.1.2.3"}, headers={"host": "127.1.2.4:80"}).status_code == 400


def test_the_host_allow_list_is_kept() -> None:
    config = {"allowed_hosts": ("llm.example",)}
    assert call("GET", "/version", config=config, headers={"host": "LLM.example:443"}).status_code == 200
    assert call("GET", "/version", config=config, headers={"host": "127.0.0.1"}).status_code == 400
    assert call("GET", "/version", config={"allowed_hosts": ("*",)}, headers={"host": "any.example"}).status_code == 200
    served = {"host": "0.0.0.0", "insecure": True}
    assert call("GET", "/version", config=served, headers={"host": "any.example"}).status_code == 200


def test_two_host_headers_are_refused() -> None:
    async def go() -> int:
        sent: list[dict[str, Any]] = []
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "path": "/version",
            "raw_path": b"/version", "query_string": b"", "scheme": "http", "root_path": "", "client": None,
            "server": None,
            "headers": [(b"host", b"127.0.0.1"), (b"host", b"localhost")],
        }  # fmt: skip

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await make_app()(scope, receive, send)
        return int(sent[0]["status"])

    assert asyncio.run(go()) == 400


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": f"Bearer {KEY}"}, 200),
        ({"authorization": f"bearer {OTHER_KEY}"}, 200),
        ({"x-api-key": KEY}, 200),
        ({"authorization": f"Bearer {KEY}", "x-api-key": KEY}, 200),
        ({"authorization": f"Bearer {KEY}", "x-api-key": OTHER_KEY}, 401),
        ({"authorization": f"Basic {KEY}"}, 401),
        ({"authorization": KEY}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": f"Bearer {KEY}x"}, 401),
        ({"authorization": f"Bearer {KEY[:-1]}"}, 401),
        ({"x-api-key": ""}, 401),
        ({"cookie": f"key={KEY}"}, 401),
    ],
)
def test_a_key_is_taken_as_bearer_or_as_x_api_key(headers: dict[str, str], status: int) -> None:
    assert call("GET", "/v1/models", config=KEYS, headers=headers).status_code == status
    assert call("GET", f"/v1/models?api_key={KEY}&key={KEY}", config=KEYS).status_code == 401


def test_keys_come_from_environment_and_file_and_bad_ones_stop_the_start(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# ours\n{KEY}\n\n{OTHER_KEY}\n")
    keys = load_keys(ServerConfig(api_keys_file=str(path), api_keys=("third-key-9999",)))
    assert all(keys.match(key) for key in (KEY, OTHER_KEY, "third-key-9999"))
    assert keys.match("# ours") is None
    path.write_text("# nothing\n")
    for config in (
        ServerConfig(api_keys_file=str(path)),
        ServerConfig(api_keys_file=str(tmp_path / "absent")),
        ServerConfig(api_keys=("short",)),
        ServerConfig(api_keys=("with a space in it",)),
    ):
        with pytest.raises(ConfigError):
            create_app(config, FakeEngine())


def test_every_key_is_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def count(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return left == right

    monkeypatch.setattr("etserve.server.auth.hmac.compare_digest", count)
    keys = ApiKeys([KEY, OTHER_KEY, "third-key-9999"])
    for presented in (KEY, "third-key-9999", "none of them"):
        compared.clear()
        keys.match(presented)
        assert len(compared) == 3
        assert {len(side) for pair in compared for side in pair} == {32}


def test_clients_share_cached_prefixes_only_under_one_key_and_one_salt() -> None:
    def salt_of(key: str | None, salt: str | None) -> bytes:
        engine = FakeEngine()
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        body = {"prompt": "a", **({} if salt is None else {"cache_salt": salt})}
        config = {} if key is None else KEYS
        assert (
            call("POST", "/v1/completions", engine=engine, config=config, headers=headers, json=body).status_code == 200
        )
        return engine.seen[0].cache_salt

    assert salt_of(None, None) == b""
    salts = [salt_of(key, salt) for key in (None, KEY, OTHER_KEY) for salt in (None, "a", "b")]
    assert len(set(salts)) == 9
    assert salt_of(KEY, "a") == salt_of(KEY, "a")
    assert KEY.encode() not in salt_of(KEY, None)
    assert cache_salt(None, "a") != cache_salt(b"", "") != b""


@pytest.mark.parametrize("echoed", ["abc", "A.b-c_1", "x" * 128])
def test_a_well_formed_request_id_is_echoed(echoed: str) -> None:
    assert call("GET", "/version", headers={"x-request-id": echoed}).headers["x-request-id"] == echoed


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "http://10.0.0.1/", "a;b", "../../etc", "é"])
def test_another_request_id_is_replaced_by_ours(given: str) -> None:
    headers = httpx.Headers([("x-request-id", given)], encoding="latin-1")
    assert re.fullmatch(r"[0-9a-f]{32}", call("GET", "/version", headers=headers).headers["x-request-id"])


def test_the_engine_never_sees_a_clients_request_id() -> None:
    engine = FakeEngine()
    call("POST", "/v1/completions", engine=engine, json={"prompt": "a"}, headers={"x-request-id": "mine"})
    assert "mine" not in engine.seen[0].request_id
    assert complete(request_id="mine").status_code == 400


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON;charset=UTF-8", 200),
        ("application/json; charset=utf-16", 415),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("", 415),
    ],
)
def test_a_body_is_json_by_its_type(content_type: str, status: int) -> None:
    reply = call("POST", "/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": content_type})
    assert reply.status_code == status
    if status != 200:
        error_of(reply)


def test_a_compressed_body_is_not_taken() -> None:
    reply = call("POST", "/v1/completions", content=b"x", headers={**JSON, "content-encoding": "gzip"})
    assert reply.status_code == 415


def test_a_body_beyond_the_limit_is_refused_with_and_without_a_length() -> None:
    config = {"max_body_bytes": 1000}
    exact = json.dumps({"prompt": "x" * 100}).encode()
    exact += b" " * (1000 - len(exact))

    async def chunks() -> Any:
        for _ in range(20):
            yield b" " * 100

    assert call("POST", "/v1/completions", config=config, content=exact, headers=JSON).status_code == 200
    for content in (exact + b" ", chunks()):
        reply = call("POST", "/v1/completions", config=config, content=content, headers=JSON)
        assert reply.status_code == 413
        assert "1000" in error_of(reply)["message"]


def test_headers_beyond_64_kib_are_refused() -> None:
    assert call("GET", "/version", headers={"x-a": "x" * 60_000}).status_code == 200
    assert call("GET", "/version", headers={"x-a": "x" * 66_000}).status_code == 431
    assert call("GET", "/version", headers={f"x-{i}": "x" * 1000 for i in range(70)}).status_code == 431
    assert call("GET", "/version?" + "x" * 40_000, headers={"x-a": "x" * 30_000}).status_code == 431


@pytest.mark.parametrize(
    "body",
    [b"[]", b'"x"', b"5", b"null", b"true", b"{", b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "\\ud800"}', b""],
)
def test_a_body_that_is_no_sound_object_is_400_on_every_route(body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        reply = call("POST", path, content=body, headers=JSON)
        assert reply.status_code == 400
        error_of(reply)


def test_there_is_no_cors() -> None:
    headers = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    for method in ("OPTIONS", "GET", "POST"):
        reply = call(method, "/v1/chat/completions", headers=headers)
        assert not [name for name in reply.headers if name.startswith("access-control")]
        assert reply.status_code in (400, 405, 415)


def test_unknown_routes_and_methods_are_refused_in_openais_shape() -> None:
    for path in ("/nope", "/v1", "/page", "/page/index.html", "/docs", "/openapi.json", "/v1/completions/"):
        reply = call("GET", path)
        assert reply.status_code == 404
        error_of(reply)
    reply = call("GET", "/v1/completions")
    assert reply.status_code == 405
    assert reply.headers["allow"] == "POST"


def test_unknown_fields_are_named() -> None:
    for reply in (complete(frobnicate=1), chat(frobnicate=1)):
        error = error_of(reply)
        assert error["param"] == "frobnicate"
        assert error["code"] == "unknown_parameter"
    assert error_of(chat(messages=[{"role": "user", "content": "a", "x": 1}]))["param"] == "messages[0].x"


def test_while_the_model_loads_only_health_answers() -> None:
    async def go() -> None:
        async with client_of(create_app(ServerConfig(), FakeEngine(state="starting"))) as client:
            assert (await client.get("/health/live")).status_code == 200
            for path in ("/health/ready", "/health", "/v1/models"):
                reply = await client.get(path)
                assert reply.status_code == 503
                assert "retry-after" in reply.headers
            reply = await client.post("/v1/completions", json={"prompt": "a"})
            assert reply.status_code == 503
            assert (await client.get("/metrics")).status_code == 200

    asyncio.run(go())


def test_readiness_follows_the_engine_and_liveness_does_not() -> None:
    for state in ("restarting", "failed", "draining"):
        assert call("GET", "/health/ready", engine=FakeEngine(state=state)).json() == {"status": state}
        assert call("GET", "/health", engine=FakeEngine(state=state)).status_code == 503
        assert call("GET", "/health/live", engine=FakeEngine(state=state)).status_code == 200
    assert call("GET", "/health").json() == {"status": "ready"}


def test_no_prompt_key_or_header_reaches_the_log(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    canary = "canary-5ec2e7"
    engine = FakeEngine(raise_after=1)
    headers = {"authorization": f"Bearer {KEY}", "x-canary": canary}
    with caplog.at_level("DEBUG"):
        reply = call("POST", "/v1/completions", engine=engine, config=KEYS, headers=headers, json={"prompt": canary})
    assert reply.status_code == 500
    facts = [vars(record).get("facts", {}) for record in caplog.records]
    assert any(fact.get("error") == "ValueError" for fact in facts)
    written = caplog.text + str(facts) + "".join(capfd.readouterr())
    for secret in (canary, KEY, "secret"):
        assert secret not in written
