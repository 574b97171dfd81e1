"""Puts a plan onto a server: so many at a time (closed loop) or each at its time (open loop)."""

import asyncio
import time
from collections.abc import Callable, Iterator

from etserve.bench.client import Target, open_session, send
from etserve.bench.records import RequestRecord
from etserve.bench.workloads import PlannedRequest

Progress = Callable[[RequestRecord], None]
START_DELAY_SECONDS = 0.05  # all is encoded and scheduled before the first request leaves


async def run_closed(
    target: Target, planned: list[PlannedRequest], concurrency: int, progress: Progress = lambda _: None
) -> list[RequestRecord]:
    """Keep `concurrency` requests open until the plan is through. Records in the order of the plan."""
    work = iter([(request, target.body(request)) for request in planned])
    records: list[RequestRecord] = []
    async with open_session(target) as session:
        origin = time.monotonic()

        async def worker(mine: Iterator[tuple[PlannedRequest, bytes]]) -> None:
            for request, body in mine:
                record = await send(session, target, request, body, origin)
                records.append(record)
                progress(record)

        await asyncio.gather(*(worker(work) for _ in range(min(concurrency, len(planned)))))
    return sorted(records, key=lambda record: record.index)


async def run_open(
    target: Target, planned: list[PlannedRequest], progress: Progress = lambda _: None
) -> list[RequestRecord]:
    """Send each request at its arrival time, whatever became of the others. Records in the order of the plan."""
    bodies = [target.body(request) for request in planned]
    async with open_session(target) as session:
        origin = time.monotonic() + START_DELAY_SECONDS

        async def at_its_time(request: PlannedRequest, body: bytes) -> RequestRecord:
            await asyncio.sleep(max(0.0, origin + (request.arrival_seconds or 0.0) - time.monotonic()))
            record = await send(session, target, request, body, origin)
            progress(record)
            return record

        tasks = [at_its_time(request, body) for request, body in zip(planned, bodies, strict=True)]
        return list(await asyncio.gather(*tasks))


async def run_plan(
    target: Target, planned: list[PlannedRequest], concurrency: int | None, progress: Progress = lambda _: None
) -> list[RequestRecord]:
    """Closed loop when `concurrency` is given, open loop otherwise."""
    if concurrency is not None:
        return await run_closed(target, planned, concurrency, progress)
    return await run_open(target, planned, progress)
