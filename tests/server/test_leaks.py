"""Requests leave nothing behind in the front end."""

import asyncio
import gc
import random

from tests.fakes import FakeEngine
from tests.server.helpers import client_of, make_app


def test_neither_objects_nor_tasks_grow_with_the_number_of_requests() -> None:
    rng = random.Random(3)
    engine = FakeEngine()

    async def go() -> tuple[int, int, int]:
        async with client_of(make_app(engine)) as client:

            async def some_requests(count: int) -> int:
                for _ in range(count):
                    body = {"prompt": "a" * rng.randint(1, 50), "max_tokens": 3, "stream": rng.random() < 0.5}
                    if rng.random() < 0.2:
                        body["n"] = "malformed"
                    await client.post("/v1/completions", json=body)
                engine.seen.clear()
                gc.collect()
                return len(gc.get_objects())

            before = await some_requests(200)
            after = await some_requests(400)
            return before, after, len(asyncio.all_tasks())

    before, after, num_tasks = asyncio.run(go())
    assert after - before < 400  # not even one object a request
    assert num_tasks == 1
    assert engine.running == {}


def test_a_storm_of_cancellations_ends_each_request_once() -> None:
    rng = random.Random(5)
    engine = FakeEngine(step_seconds=0.001)

    async def go() -> None:
        async with client_of(make_app(engine)) as client:

            async def one() -> None:
                body = {"prompt": "a", "max_tokens": rng.randint(1, 200), "stream": rng.random() < 0.5}
                request = asyncio.create_task(client.post("/v1/completions", json=body))
                if rng.random() < 0.5:
                    await asyncio.sleep(rng.random() * 0.2)
                    request.cancel()
                await asyncio.gather(request, return_exceptions=True)

            await asyncio.gather(*(one() for _ in range(150)))
            text = (await client.get("/metrics")).text
        finished = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if "requests_finished_total{" in line]
        assert sum(finished) == len(engine.seen)
        assert "etserve_requests_running 0.0" in text

    asyncio.run(go())
    assert engine.running == {}
