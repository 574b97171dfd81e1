"""500 requests at once: random lengths, a third cancelled at a random point, a tenth malformed."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass

import httpx

from tests.e2e.conftest import Server

NUM_REQUESTS = 500
MALFORMED: list[bytes] = [
    b"{",
    b'{"model":"demo","prompt":"x","max_tokens":-1}',
    b'{"model":"demo","prompt":"x","temperature":NaN}',
    b'{"model":"demo","prompt":[1,2,999999999]}',
    b'{"model":"demo","prompt":"x","no_such_option":1}',
    b'{"model":"demo"}',
]


@dataclass(frozen=True)
class Fate:
    kind: str  # what was meant to happen
    status: int
    terminal_events: int


async def _one(client: httpx.AsyncClient, index: int, gate: asyncio.Semaphore) -> Fate:
    rng = random.Random(index)
    async with gate:
        if index % 10 == 0:
            reply = await client.post(
                "/v1/completions", content=rng.choice(MALFORMED), headers={"content-type": "application/json"}
            )
            return Fate("malformed", reply.status_code, 1)
        body = {
            "model": "demo",
            "prompt": "word " * rng.randint(1, 120),
            "max_tokens": rng.randint(1, 24),
            "stream": True,
            "seed": index,
        }
        cancel_after = rng.randint(0, 8) if index % 3 == 0 else None
        ended = 0
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            chunks = 0
            async for line in reply.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if cancel_after is not None and chunks >= cancel_after:
                    return Fate("cancelled", reply.status_code, 1)
                chunks += 1
                ended += '"finish_reason":"' in line.replace(" ", "")
            return Fate("completed", reply.status_code, ended)


async def _storm(url: str) -> list[Fate]:
    limits = httpx.Limits(max_connections=128)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        gate = asyncio.Semaphore(128)
        return await asyncio.gather(*[_one(client, i, gate) for i in range(NUM_REQUESTS)])


def _engine_pids(server: Server) -> set[str]:
    from pathlib import Path

    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return set(children)


async def _wait_until_idle(server: Server) -> None:
    for _ in range(100):
        if server.metric("etserve_requests_running") == 0 and server.metric("etserve_requests_waiting") == 0:
            return
        await asyncio.sleep(0.1)


def test_after_a_storm_every_request_has_ended_once_and_every_block_is_free(demo_server: Server) -> None:
    before = _engine_pids(demo_server)
    fates = asyncio.run(_storm(demo_server.url))
    assert len(fates) == NUM_REQUESTS
    for fate in fates:
        if fate.kind == "malformed":
            assert fate.status == 400, fate
        else:
            assert fate.status == 200, fate
        assert fate.terminal_events == 1, fate
    counts = Counter(f.kind for f in fates)
    assert counts["malformed"] == NUM_REQUESTS // 10
    assert counts["cancelled"] > NUM_REQUESTS // 10
    asyncio.run(_wait_until_idle(demo_server))
    assert _active_blocks(demo_server) == 0
    assert _engine_pids(demo_server) == before


def _active_blocks(server: Server) -> float:
    lines = [
        x for x in server.get("/metrics").splitlines() if x.startswith("etserve_kv_blocks{") and 'state="active"' in x
    ]
    return sum(float(x.rsplit(" ", 1)[1]) for x in lines)
