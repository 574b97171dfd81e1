"""Requests and tokens a minute, by key: what is let in, what it costs, and what the client is told."""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from etserve.server import rate_limits
from etserve.server.edge import Edge
from tests.fakes import FakeEngine, fake_model_info
from tests.server.helpers import chat, client_of, complete, live_server, make_app

KEY, OTHER_KEY = "key-of-anna-1234", "key-of-boris-5678"
KEYS = {"api_keys": (KEY, OTHER_KEY)}
PROMPT = "hello"  # the unit model's tokens are bytes
NUM_PROMPT = len(PROMPT)
Act = Callable[[httpx.AsyncClient], Awaitable[None]]


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The wall clock of the limits, which stands still until it is set."""
    clock = Clock()
    for module in ("limits.storage.memory", "limits.strategies", "etserve.server.rate_limits"):
        monkeypatch.setattr(f"{module}.time", SimpleNamespace(time=clock.time))
    return clock


def within(app: Edge, act: Act) -> None:
    async def go() -> None:
        async with client_of(app) as client:
            await act(client)

    asyncio.run(go())


async def ask(client: httpx.AsyncClient, key: str | None = None, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4, **body}, headers=headers)


async def converse(client: httpx.AsyncClient) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})


def remaining(reply: httpx.Response, unit: str) -> int:
    return int(reply.headers[f"x-ratelimit-remaining-{unit}"])


def test_without_the_settings_nothing_is_limited_or_imported() -> None:
    assert not [name for name in complete().headers if name.startswith("x-ratelimit")]
    program = (
        "import sys; from etserve.server.app import create_app; from etserve.config import ServerConfig;"
        "from tests.fakes import FakeEngine; create_app(ServerConfig(), FakeEngine());"
        "sys.exit('limits' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_requests_beyond_the_limit_are_refused_until_the_minute_is_over(clock: Clock) -> None:
    async def act(client: httpx.AsyncClient) -> None:
        first = await ask(client)
        assert first.status_code == 200
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-reset-requests"] == "1m0s"
        assert "x-ratelimit-limit-tokens" not in first.headers
        clock.now += 17.5
        assert (await ask(client)).status_code == 200
        refused = await ask(client)
        assert refused.status_code == 429
        assert refused.json() == {
            "error": {
                "message": "The limit of 2 requests per minute is reached. Try again later.",
                "type": "rate_limit_error",
                "param": None,
                "code": "rate_limit_exceeded",
            }
        }
        assert refused.headers["retry-after"] == "43"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert refused.headers["x-ratelimit-reset-requests"] == "42.5s"
        clock.now += 42.5
        assert remaining(await ask(client), "requests") == 1

    within(make_app(requests_per_minute=2), act)


def test_both_routes_draw_on_one_allowance_and_no_other_route_does(clock: Clock) -> None:
    async def act(client: httpx.AsyncClient) -> None:
        for _ in range(3):
            listed = await client.get("/v1/models")
            assert listed.status_code == 200
            assert "x-ratelimit-limit-requests" not in listed.headers
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        assert (await ask(client)).status_code == 429

    within(make_app(requests_per_minute=1), act)


def test_each_key_has_its_own_allowance(clock: Clock) -> None:
    async def act(client: httpx.AsyncClient) -> None:
        assert (await ask(client, KEY)).status_code == 200
        assert (await ask(client, KEY)).status_code == 429
        assert (await ask(client, OTHER_KEY)).status_code == 200
        assert (await ask(client, "no-key-of-ours")).status_code == 401

    within(make_app(requests_per_minute=1, **KEYS), act)


def test_where_no_key_is_needed_all_clients_share_one_allowance(clock: Clock) -> None:
    async def act(client: httpx.AsyncClient) -> None:
        assert (await ask(client, "whatever-key")).status_code == 200
        assert (await ask(client, "another-key")).status_code == 429

    within(make_app(requests_per_minute=1), act)


def test_equal_limits_of_requests_and_tokens_are_counted_apart(clock: Clock) -> None:
    async def act(client: httpx.AsyncClient) -> None:
        reply = await ask(client)
        assert remaining(reply, "requests") == 99
        assert remaining(reply, "tokens") == 100 - NUM_PROMPT - 4

    within(make_app(requests_per_minute=100, tokens_per_minute=100), act)


def test_tokens_are_reserved_at_first_and_corrected_at_the_end(clock: Clock) -> None:
    async def act(client: httpx.AsyncClient) -> None:
        first = await ask(client, max_tokens=50)  # ends after two
        assert remaining(first, "tokens") == 100 - NUM_PROMPT - 50
        second = await ask(client, max_tokens=50)
        assert second.status_code == 200
        assert remaining(second, "tokens") == 100 - (NUM_PROMPT + 2) - (NUM_PROMPT + 50)

    within(make_app(FakeEngine(text="ab"), tokens_per_minute=100), act)


def test_every_prompt_and_every_choice_is_reserved_for(clock: Clock) -> None:
    async def act(client: httpx.AsyncClient) -> None:
        reply = await ask(client, prompt=["ab", "cde"], n=3, max_tokens=7)
        assert remaining(reply, "tokens") == 1000 - (2 + 3) - 2 * 3 * 7

    within(make_app(tokens_per_minute=1000), act)


@pytest.mark.parametrize("stream", [False, True])
def test_a_running_request_holds_its_reservation(clock: Clock, stream: bool) -> None:
    engine = FakeEngine(step_seconds=0.01, text="abcdefgh")

    async def act(client: httpx.AsyncClient) -> None:
        running = asyncio.create_task(ask(client, max_tokens=60, stream=stream))
        while not engine.running:
            await asyncio.sleep(0.001)
        refused = await ask(client, max_tokens=60)
        assert refused.status_code == 429
        assert refused.json()["error"]["message"].startswith("The limit of 100 tokens per minute is reached.")
        assert remaining(refused, "tokens") == 100 - NUM_PROMPT - 60
        assert (await running).status_code == 200
        assert remaining(await ask(client, max_tokens=60), "tokens") == 100 - (NUM_PROMPT + 8) - (NUM_PROMPT + 60)

    within(make_app(engine, tokens_per_minute=100), act)


def test_a_client_that_leaves_pays_for_what_was_drawn(clock: Clock) -> None:
    engine = FakeEngine(silent_seconds=30.0)

    async def act(client: httpx.AsyncClient) -> None:
        running = asyncio.create_task(ask(client, max_tokens=60))
        while not engine.running:
            await asyncio.sleep(0.001)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        engine.silent_seconds = 0.0
        assert remaining(await ask(client, max_tokens=60), "tokens") == 100 - NUM_PROMPT - (NUM_PROMPT + 60)

    within(make_app(engine, tokens_per_minute=100), act)


def test_what_was_reserved_in_a_minute_that_is_over_is_not_given_back_to_the_next(clock: Clock) -> None:
    engine = FakeEngine(step_seconds=0.01, text="abcdefgh")

    async def act(client: httpx.AsyncClient) -> None:
        running = asyncio.create_task(ask(client, max_tokens=90))
        while not engine.running:
            await asyncio.sleep(0.001)
        clock.now += 61.0
        assert remaining(await ask(client, max_tokens=20), "tokens") == 100 - NUM_PROMPT - 20
        await running
        engine.text = "a"
        assert remaining(await ask(client, max_tokens=1), "tokens") == 100 - (NUM_PROMPT + 8) - (NUM_PROMPT + 1)

    within(make_app(engine, tokens_per_minute=100), act)


def test_a_refused_request_costs_nothing_whatever_it_was_refused_for(clock: Clock) -> None:
    engine = FakeEngine(info=fake_model_info(max_model_len=64))

    async def act(client: httpx.AsyncClient) -> None:
        assert (await ask(client, no_such_field=1)).status_code == 400
        assert (await ask(client, max_tokens=70)).json()["error"]["code"] == "context_length_exceeded"
        engine.overloaded = True
        overloaded = await ask(client)
        assert overloaded.json()["error"]["code"] == "overloaded"
        assert remaining(overloaded, "requests") == 3
        assert remaining(overloaded, "tokens") == 100
        engine.overloaded = False
        assert (await ask(client, max_tokens=50)).status_code == 200
        refused = await ask(client, max_tokens=50)  # for its tokens: the request is not counted either
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert remaining(refused, "requests") == 2
        last = await ask(client, max_tokens=4)
        assert remaining(last, "requests") == 1
        assert remaining(last, "tokens") == 100 - (NUM_PROMPT + 50) - (NUM_PROMPT + 4)

    within(make_app(engine, requests_per_minute=3, tokens_per_minute=100), act)


def test_a_request_that_can_never_fit_is_told_not_to_come_back(clock: Clock) -> None:
    async def act(client: httpx.AsyncClient) -> None:
        refused = await ask(client, max_tokens=200)
        assert refused.status_code == 429
        assert refused.json()["error"]["message"] == "The request may take 205 tokens, the limit is 100 per minute."
        assert refused.headers["x-should-retry"] == "false"
        assert "retry-after" not in refused.headers
        assert remaining(refused, "tokens") == 100

    within(make_app(tokens_per_minute=100), act)


def test_without_max_tokens_the_rest_of_the_context_is_reserved(clock: Clock) -> None:
    engine = FakeEngine(text="abc", info=fake_model_info(max_model_len=500))

    async def act(client: httpx.AsyncClient) -> None:
        assert remaining(await converse(client), "tokens") == 800 - 500

    within(make_app(engine, tokens_per_minute=800), act)


def test_without_max_tokens_no_more_is_reserved_than_is_left_and_the_excess_is_owed(clock: Clock) -> None:
    engine = FakeEngine(text="a" * 50, step_seconds=0.002)
    used = chat(FakeEngine()).json()["usage"]["prompt_tokens"] + 50
    limit = 2 * used - 20

    async def act(client: httpx.AsyncClient) -> None:
        running = asyncio.create_task(converse(client))
        while not engine.running:
            await asyncio.sleep(0.001)
        refused = await converse(client)
        assert (refused.status_code, remaining(refused, "tokens")) == (429, 0)
        assert (await running).status_code == 200
        assert remaining(await ask(client, max_tokens=1), "tokens") == limit - used - NUM_PROMPT - 1
        assert (await converse(client)).status_code == 200  # draws more than was left
        refused = await ask(client, prompt="x", max_tokens=0, echo=True)
        assert (refused.status_code, remaining(refused, "tokens")) == (429, 0)
        clock.now += 60.0
        assert (await converse(client)).status_code == 200

    within(make_app(engine, tokens_per_minute=limit), act)


def test_refusals_are_counted_by_their_reason(clock: Clock) -> None:
    async def act(client: httpx.AsyncClient) -> None:
        await ask(client, max_tokens=200)
        await ask(client)
        await ask(client)
        page = (await client.get("/metrics")).text
        assert 'etserve_requests_rejected_total{reason="token_rate"} 1.0' in page
        assert 'etserve_requests_rejected_total{reason="request_rate"} 1.0' in page

    within(make_app(requests_per_minute=1, tokens_per_minute=100), act)


def test_openais_client_reads_the_headers_and_obeys_the_refusals() -> None:
    with (
        live_server(requests_per_minute=1, tokens_per_minute=1000, **KEYS) as live,
        openai.OpenAI(base_url=f"{live.url}/v1", api_key=KEY, max_retries=2) as client,
    ):
        with pytest.raises(openai.RateLimitError) as never:  # at once: it does not try again
            client.completions.create(model="unit", prompt=PROMPT, max_tokens=1500)
        assert never.value.code == "rate_limit_exceeded"
        raw = client.completions.with_raw_response.create(model="unit", prompt=PROMPT, max_tokens=4)
        assert raw.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(openai.RateLimitError) as later:
            client.with_options(max_retries=0).completions.create(model="unit", prompt=PROMPT, max_tokens=4)
        assert 1 <= int(later.value.response.headers["retry-after"]) <= 60
        assert len(live.engine.seen) == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0s"), (0.0001, "1ms"), (0.12, "120ms"), (1.0, "1s"), (8.64, "8.64s"), (60.0, "1m0s"), (61.5, "1m1.5s")],
)
def test_durations_are_spelled_as_go_spells_them(seconds: float, text: str) -> None:
    assert rate_limits.spell_duration(seconds) == text
