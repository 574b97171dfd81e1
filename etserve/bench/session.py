"""Rounds of one workload against one or several servers, interleaved, and the result files they leave."""

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from etserve.bench import host, load
from etserve.bench.client import Target
from etserve.bench.errors import BenchError
from etserve.bench.records import BenchResult, RequestRecord, RoundResult
from etserve.bench.summary import Slo, summarise
from etserve.bench.workloads import PlannedRequest

Planner = Callable[[int], tuple[list[PlannedRequest], list[PlannedRequest]]]  # seed -> (warm-up, counted)
ROUND_SEED_STEP = 1_000_003  # rounds of one run have prompts of their own
SETTLE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Server:
    """One server under test. `pids` name its processes (descendants are found); empty: looked up by port."""

    name: str
    target: Target
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """The workload as it is put onto every server."""

    planner: Planner
    concurrency: int | None
    described: dict[str, Any]
    seed: int


def run_round(
    server: Server, given: Load, round_index: int, progress: Callable[[RequestRecord], None] = lambda _: None
) -> RoundResult:
    """Warm up, settle, measure. Raises BenchError when the warm-up finds nobody there."""
    seed = given.seed + ROUND_SEED_STEP * round_index
    warm, counted = given.planner(seed)
    pids = list(server.pids) or host.listener_pids(server.target.url)
    if warm:
        _check_warmup(server, asyncio.run(load.run_closed(server.target, warm, given.concurrency or len(warm))))
        time.sleep(SETTLE_SECONDS)
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    before = host.snapshot(pids)
    records = asyncio.run(load.run_plan(server.target, counted, given.concurrency, progress))
    after = host.snapshot(pids)
    return RoundResult(
        seed=seed,
        started_at=started_at,
        records=records,
        cpu=host.shares(before, after),
        server_peak_bytes=host.peak_bytes(pids),
    )


def _check_warmup(server: Server, records: list[RequestRecord]) -> None:
    failed = [record for record in records if record.error is not None]
    if len(failed) == len(records):
        raise BenchError(f"{server.name}: every warm-up request failed ({failed[0].error}): {failed[0].detail}")


def result(server: Server, given: Load, rounds: list[RoundResult], slo: Slo | None = None) -> BenchResult:
    """What goes into the result file."""
    return BenchResult(
        name=server.name,
        url=server.target.url,
        model=server.target.model,
        workload=given.described,
        api=server.target.api,
        seed=given.seed,
        machine=host.describe_machine(),
        rounds=rounds,
        summaries=[msgspec.to_builtins(summarise(each, slo)) for each in rounds],
    )


def path_for(found: BenchResult, folder: Path) -> Path:
    """Where a result goes that is one of several: WORKLOAD-SERVER.json."""
    return folder / (re.sub(r"[^\w.-]+", "_", f"{found.workload['name']}-{found.name}") + ".json")


def save(found: BenchResult, path: Path) -> None:
    """Write a result file. Raises BenchError naming it."""
    write(found, path)


def write(found: msgspec.Struct, path: Path) -> None:
    """Write anything that was measured as JSON. Raises BenchError naming the file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(found))
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from None


def read(path: Path) -> BenchResult:
    """Read a result file. Raises BenchError naming it and what is wrong."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=BenchResult)
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise BenchError(f"{path}: not a result file: {error}") from None
