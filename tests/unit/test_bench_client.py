"""The client tells what came, when, and how it failed; the loops keep to their plan."""

import asyncio
import socket
from pathlib import Path

import pytest

from etserve.bench import load, session
from etserve.bench.client import ERROR_KINDS, Target, first_model
from etserve.bench.errors import BenchError
from etserve.bench.records import RequestRecord
from etserve.bench.session import Load, Server
from tests.unit.bench_helpers import FakeServer, planned, serving


def run(server: FakeServer, count: int, concurrency: int | None = 1, **options: object) -> list[RequestRecord]:
    target = Target(server.url, "fake-model", **options)  # type: ignore[arg-type]
    gap = None if concurrency else 0.05
    return asyncio.run(load.run_plan(target, planned(count, gap_seconds=gap), concurrency))


def test_a_stream_gives_exact_counts_and_one_time_per_token() -> None:
    with serving(FakeServer(pause_seconds=0.02)) as server:
        (record,) = run(server, 1)
    assert record.error is None
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (record.prompt_tokens_asked, 4, 3)
    assert record.chunk_tokens == [1, 1, 1, 1]
    assert record.chunk_seconds == sorted(record.chunk_seconds)
    assert record.sent_seconds < record.chunk_seconds[0] < record.chunk_seconds[-1] <= record.end_seconds
    assert len(record.inter_token_latencies()) == 3


def test_chunks_of_several_tokens_are_counted_by_the_usage() -> None:
    with serving(FakeServer(tokens_per_chunk=3, pause_seconds=0.02)) as server:
        (record,) = run(server, 1)
    assert record.chunk_tokens == [3, 1]


def test_a_request_is_greedy_of_fixed_length_and_streams_its_usage() -> None:
    with serving(FakeServer()) as server:
        run(server, 1, api_key="secret", extra_body={"min_tokens": 4, "temperature": None})
    (body,) = server.bodies
    assert body == {
        "model": "fake-model",
        "prompt": "prompt number 0",
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "min_tokens": 4,
    }
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_the_chat_api_is_spoken_too() -> None:
    with serving(FakeServer()) as server:
        (record,) = run(server, 1, api="chat")
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "prompt number 0"}]
    assert record.error is None
    assert record.output_tokens == 4


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("refuse", "refused"),
        ("drop", "disconnect"),
        ("cut", "disconnect"),
        ("error", "stream"),
        ("garbage", "stream"),
        ("no_usage", "incomplete"),
        ("empty", "incomplete"),
    ],
)
def test_each_failure_has_its_kind_and_leaves_the_neighbours_alone(fault: str, kind: str) -> None:
    with serving(FakeServer(faults={1: fault})) as server:
        records = run(server, 3)
    assert [record.error for record in records] == [None, kind, None]
    assert kind in ERROR_KINDS
    assert records[1].detail


def test_a_refusal_keeps_the_servers_words() -> None:
    with serving(FakeServer(faults={0: "refuse"})) as server:
        (record,) = run(server, 1)
    assert "429" in record.detail
    assert "too busy" in record.detail


def test_a_request_that_takes_too_long_is_a_timeout() -> None:
    with serving(FakeServer(faults={0: "hang"})) as server:
        (record,) = run(server, 1, timeout_seconds=0.3)
    assert record.error == "timeout"


def test_nobody_listening_is_a_connect_error() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        target = Target(f"http://127.0.0.1:{free.getsockname()[1]}", "m")
        (record,) = asyncio.run(load.run_closed(target, planned(1), 1))
    assert record.error == "connect"


def test_a_closed_loop_keeps_exactly_its_concurrency_open() -> None:
    with serving(FakeServer(pause_seconds=0.005)) as server:
        records = run(server, 12, concurrency=4)
    assert server.max_open == 4
    assert [record.index for record in records] == list(range(12))
    assert all(record.scheduled_seconds == record.sent_seconds for record in records)


def test_an_open_loop_sends_on_time_whatever_the_others_do() -> None:
    with serving(FakeServer(faults={0: "hang"})) as server:
        records = run(server, 4, concurrency=None, timeout_seconds=1.0)
    assert [record.scheduled_seconds for record in records] == pytest.approx([0.0, 0.05, 0.1, 0.15])
    assert all(record.sent_seconds >= record.scheduled_seconds for record in records)
    assert [record.error for record in records] == ["timeout", None, None, None]


def test_progress_hears_of_every_request() -> None:
    heard: list[int] = []
    with serving(FakeServer()) as server:
        target = Target(server.url, "fake-model")
        asyncio.run(load.run_closed(target, planned(5), 2, lambda record: heard.append(record.index)))
    assert sorted(heard) == [0, 1, 2, 3, 4]


def test_the_model_is_the_first_one_listed() -> None:
    with serving(FakeServer()) as server:
        assert asyncio.run(first_model(server.url, None)) == "fake-model"
        with pytest.raises(BenchError, match="answers 404"):
            asyncio.run(first_model(server.url + "/elsewhere", None))
    with pytest.raises(BenchError, match="does not answer"):
        asyncio.run(first_model(server.url, None))


def fixed_load() -> Load:
    return Load(lambda _: (planned(1), planned(3)), 2, {"name": "fixed", "num_requests": 3}, seed=5)


def test_warmup_is_sent_but_not_counted() -> None:
    with serving(FakeServer()) as server:
        found = session.run_round(Server("fake", Target(server.url, "fake-model")), fixed_load(), 1)
    assert len(server.bodies) == 4
    assert len(found.records) == 3
    assert found.seed == 5 + session.ROUND_SEED_STEP
    assert found.cpu is None or 0.0 <= found.cpu.client <= 1.0


def test_a_warmup_that_finds_nobody_ends_the_run() -> None:
    with serving(FakeServer(faults={0: "refuse"})) as server, pytest.raises(BenchError, match="every warm-up request"):
        session.run_round(Server("fake", Target(server.url, "fake-model")), fixed_load(), 0)


def test_a_result_file_reads_back_as_it_was(tmp_path: Path) -> None:
    with serving(FakeServer()) as server:
        subject = Server("fake", Target(server.url, "fake-model"))
        found = session.result(subject, fixed_load(), [session.run_round(subject, fixed_load(), 0)])
    session.save(found, tmp_path / "deep" / "result.json")
    assert session.read(tmp_path / "deep" / "result.json") == found


def test_what_is_no_result_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"name": 3}')
    with pytest.raises(BenchError, match=r"x\.json: not a result file"):
        session.read(tmp_path / "x.json")
    with pytest.raises(BenchError, match="No such file"):
        session.read(tmp_path / "y.json")
