"""The engine process may be killed, stopped or fed nonsense: streams go on or end with a reason; nothing is left."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from etserve.engine.child import EngineLostError, EngineProcess
from etserve.engine.frames import Configure
from etserve.engine.process import ProcessEngine
from etserve.engine.streams import merge
from etserve.errors import ConfigError, EngineStartError, EngineUnavailableError, ModelError, RequestError
from etserve.outputs import GenerateRequest, SequenceOutput, StepStats
from etserve.sampling_params import Grammar
from tests.engine.helpers import PROMPTS, UNIT_MODEL, make_engine, request, run, unit_config


@dataclass
class Bench:
    """One engine for the whole module, and the event loop that it lives on; tests leave it ready."""

    runner: asyncio.Runner
    engine: ProcessEngine

    def go(self, main: Callable[[ProcessEngine], Coroutine[Any, Any, None]]) -> None:
        async def bounded() -> None:
            await asyncio.wait_for(main(self.engine), 120.0)

        self.runner.run(bounded())

    async def ready(self) -> None:
        while not self.engine.health().is_ready:
            await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def shared() -> Iterator[Bench]:
    with asyncio.Runner() as runner:
        engine = ProcessEngine(unit_config(), log_level="critical", first_backoff_seconds=0.05)
        runner.run(engine.start())
        pid = pid_of(engine)
        yield Bench(runner, engine)
        pids = {pid, engine.health().engine_pid}
        runner.run(engine.stop())
        runner.run(engine.stop())
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids if pid)


@pytest.fixture
def bench(shared: Bench) -> Bench:
    shared.engine._restart_times.clear()
    shared.runner.run(asyncio.wait_for(shared.ready(), 60.0))
    return shared


async def collect(engine: ProcessEngine, wanted: GenerateRequest) -> list[SequenceOutput]:
    return [output async for output in engine.generate(wanted)]


async def until_tokens(engine: ProcessEngine, count: int) -> None:
    """Wait until readers were given so many tokens in all."""
    seen = asyncio.Event()
    total = 0

    def listen(_stats: StepStats, outputs: list[SequenceOutput]) -> None:
        nonlocal total
        total += sum(len(output.token_ids) for output in outputs)
        if total >= count:
            seen.set()

    engine.add_step_listener(listen)
    await seen.wait()


def pid_of(engine: ProcessEngine) -> int:
    pid = engine.health().engine_pid
    assert pid is not None
    return pid


def long_request() -> GenerateRequest:
    return request("long", PROMPTS[0], max_tokens=1500, ignore_eos=True)


def mixed() -> list[GenerateRequest]:
    return [
        request(str(i), prompt, temperature=0.9 * (i % 2), seed=i, n=1 + i % 2, max_tokens=60, stop=("zq",))
        for i, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def undisturbed() -> dict[tuple[str, int], SequenceOutput]:
    return run(make_engine(), mixed())


def check_streams(streams: list[list[SequenceOutput]], undisturbed: dict[tuple[str, int], SequenceOutput]) -> None:
    for outputs in streams:
        for choice in {output.choice for output in outputs}:
            whole = merge([output for output in outputs if output.choice == choice])
            expected = undisturbed[whole.request_id, choice]
            assert whole.token_ids == expected.token_ids
            assert whole.text == expected.text
            assert whole.finish_reason == expected.finish_reason
            assert whole.num_output_tokens == expected.num_output_tokens
    assert sum(output.finish_reason is not None for outputs in streams for output in outputs) == len(undisturbed)


def test_streams_through_the_process_are_those_of_the_plain_engine(
    bench: Bench, undisturbed: dict[tuple[str, int], SequenceOutput]
) -> None:
    async def main(engine: ProcessEngine) -> None:
        streams = await asyncio.gather(*(collect(engine, item) for item in mixed()))
        check_streams(streams, undisturbed)
        assert engine.load().num_running == 0
        assert engine.load().kv_usage_ratio == 0.0

    bench.go(main)


def test_signals_meant_for_the_group_do_not_end_the_engine(bench: Bench) -> None:
    async def main(engine: ProcessEngine) -> None:
        before = pid_of(engine)
        for name in (signal.SIGINT, signal.SIGTERM):
            os.kill(before, name)
        assert (await collect(engine, request("r", PROMPTS[0])))[-1].finish_reason == "length"
        assert pid_of(engine) == before

    bench.go(main)


def test_closing_an_iterator_frees_the_engine_within_steps(bench: Bench) -> None:
    async def main(engine: ProcessEngine) -> None:
        iterator = engine.generate(long_request())
        assert (await anext(iterator)).token_ids
        last: list[StepStats] = []
        engine.add_step_listener(lambda stats, _: last.append(stats))
        await iterator.aclose()
        while not last or last[-1].kv_blocks_active:
            await asyncio.sleep(0.01)

    bench.go(main)


def test_an_error_of_one_request_does_not_reach_the_others(bench: Bench) -> None:
    """The engine refuses a grammar that the front end let through; the stream says so."""

    async def main(engine: ProcessEngine) -> None:
        wanted = request("r", PROMPTS[0], grammar=Grammar(kind="json_schema", schema="{"))
        with pytest.raises(RequestError):
            engine.generate(wanted)
        with patch("etserve.engine.front.validate_grammar"):
            refused = asyncio.create_task(collect(engine, wanted))
            good = asyncio.create_task(collect(engine, request("good", PROMPTS[0])))
            assert (await refused)[-1].error_code == "invalid_schema"
            assert (await good)[-1].finish_reason == "length"

    bench.go(main)


def test_streams_survive_a_killed_engine_with_the_same_tokens(
    bench: Bench, undisturbed: dict[tuple[str, int], SequenceOutput]
) -> None:
    async def main(engine: ProcessEngine) -> None:
        readers = [asyncio.create_task(collect(engine, item)) for item in mixed()]
        await until_tokens(engine, 40)
        before, num_restarts = pid_of(engine), engine.health().num_restarts
        os.kill(before, signal.SIGKILL)
        check_streams(list(await asyncio.gather(*readers)), undisturbed)
        assert pid_of(engine) != before
        assert engine.health().num_restarts == num_restarts + 1

    bench.go(main)


def test_a_request_that_was_there_at_two_deaths_is_given_up(bench: Bench) -> None:
    async def main(engine: ProcessEngine) -> None:
        reader = asyncio.create_task(collect(engine, long_request()))
        for _ in range(2):
            await until_tokens(engine, 5)
            os.kill(pid_of(engine), signal.SIGKILL)
            while engine.health().is_ready:
                await asyncio.sleep(0.01)
        last = (await reader)[-1]
        assert (last.finish_reason, last.error_code) == ("error", "request_poisoned")

    bench.go(main)


def test_while_the_engine_restarts_requests_are_refused_and_aborts_end_at_once(bench: Bench) -> None:
    async def main(engine: ProcessEngine) -> None:
        reader = asyncio.create_task(collect(engine, long_request()))
        await until_tokens(engine, 5)
        os.kill(pid_of(engine), signal.SIGKILL)
        while engine.health().state != "restarting":
            await asyncio.sleep(0.01)
        with pytest.raises(EngineUnavailableError):
            engine.generate(request("new", PROMPTS[0]))
        engine.abort("long")
        assert (await reader)[-1].finish_reason == "abort"

    bench.go(main)


def test_a_request_aborted_just_before_the_engine_dies_is_not_run_again(bench: Bench) -> None:
    async def main(engine: ProcessEngine) -> None:
        reader = asyncio.create_task(collect(engine, long_request()))
        await until_tokens(engine, 3)
        os.kill(pid_of(engine), signal.SIGSTOP)
        engine.abort("long")
        os.kill(pid_of(engine), signal.SIGKILL)
        assert (await reader)[-1].finish_reason == "abort"

    bench.go(main)


def test_a_hanging_engine_is_not_ready_then_killed_and_replaced(
    bench: Bench, undisturbed: dict[tuple[str, int], SequenceOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.engine, "_hung_seconds", 0.5)
    monkeypatch.setattr(bench.engine, "_kill_after_seconds", 1.5)

    async def main(engine: ProcessEngine) -> None:
        readers = [asyncio.create_task(collect(engine, item)) for item in mixed()]
        await until_tokens(engine, 20)
        before = pid_of(engine)
        os.kill(before, signal.SIGSTOP)
        while engine.health().is_ready:
            await asyncio.sleep(0.01)
        assert pid_of(engine) == before
        monkeypatch.setattr(engine, "_hung_seconds", 5.0)
        check_streams(list(await asyncio.gather(*readers)), undisturbed)
        assert pid_of(engine) != before

    bench.go(main)


def test_stop_ends_open_requests_and_a_start_afterwards_works(bench: Bench) -> None:
    async def main(engine: ProcessEngine) -> None:
        reader = asyncio.create_task(collect(engine, long_request()))
        await until_tokens(engine, 3)
        before = pid_of(engine)
        num_files = len(os.listdir("/proc/self/fd"))
        await engine.stop()
        assert (await reader)[-1].finish_reason == "abort"
        assert not Path(f"/proc/{before}").exists()
        assert len(os.listdir("/proc/self/fd")) < num_files
        with pytest.raises(EngineUnavailableError):
            engine.generate(request("new", PROMPTS[0]))
        await engine.start()
        assert len(os.listdir("/proc/self/fd")) <= num_files

    bench.go(main)


def test_an_engine_that_dies_again_and_again_fails_for_good(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last test with the shared engine."""
    monkeypatch.setattr(bench.engine, "_first_backoff_seconds", 0.0)
    monkeypatch.setattr("etserve.engine.child.sys.executable", shutil.which("false"))

    async def main(engine: ProcessEngine) -> None:
        reader = asyncio.create_task(collect(engine, long_request()))
        await until_tokens(engine, 1)
        os.kill(pid_of(engine), signal.SIGKILL)
        assert "died" in await engine.wait_failed()
        last = (await reader)[-1]
        assert (last.finish_reason, last.error_code) == ("error", "engine_restarted")
        assert engine.health().state == "failed"
        with pytest.raises(EngineUnavailableError):
            engine.generate(request("new", PROMPTS[0]))

    bench.go(main)


def test_a_process_that_is_dead_before_its_first_message_is_lost_at_the_first_receive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real_popen = subprocess.Popen

    def start_and_wait(*_arguments: Any, **_options: Any) -> "subprocess.Popen[bytes]":
        process = real_popen([shutil.which("false") or "false"])
        process.wait()
        return process

    async def main() -> None:
        monkeypatch.setattr("etserve.engine.child.subprocess.Popen", start_and_wait)
        child = EngineProcess.spawn(Configure(unit_config()))
        await child.connect()
        with pytest.raises(EngineLostError):
            await child.receive()
        assert await child.end(0.0) == 1

    asyncio.run(main())


def broken_model(folder: Path) -> str:
    shutil.copytree(UNIT_MODEL, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return str(folder)


@pytest.mark.parametrize("case", ["no such path", "truncated", "wrong setting"])
def test_a_start_that_cannot_succeed_raises_in_one_line(case: str, tmp_path: Path) -> None:
    error: type[Exception] = ModelError
    if case == "no such path":
        config = unit_config(model=str(tmp_path / "none"))
    elif case == "truncated":
        config = unit_config(model=broken_model(tmp_path / "model"))
    else:
        config, error = unit_config(max_model_len=1_000_000), ConfigError

    async def main() -> None:
        engine = ProcessEngine(config, log_level="error")
        with pytest.raises(error) as caught:
            await engine.start()
        assert "\n" not in str(caught.value)
        if error is ModelError:
            assert str(tmp_path) in str(caught.value)
        assert engine.health().state == "failed"
        assert engine.health().engine_pid is None
        await engine.stop()

    asyncio.run(main())


def test_a_start_that_is_cancelled_leaves_no_process() -> None:
    async def main() -> None:
        engine = ProcessEngine(unit_config(), log_level="error")
        starting = asyncio.create_task(engine.start())
        while engine.health().engine_pid is None:
            await asyncio.sleep(0.01)
        pid = pid_of(engine)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not Path(f"/proc/{pid}").exists()
        await engine.stop()

    asyncio.run(main())


def test_a_start_that_takes_too_long_fails_by_name_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = tmp_path / "python"
    hangs.write_text("#!/bin/sh\nexec sleep 60\n", encoding="utf-8")
    hangs.chmod(0o755)
    monkeypatch.setattr("etserve.engine.child.sys.executable", str(hangs))

    async def main() -> None:
        engine = ProcessEngine(unit_config(), log_level="error", start_timeout_seconds=0.3)
        starting = asyncio.create_task(engine.start())
        while engine.health().engine_pid is None:
            await asyncio.sleep(0.01)
        pid = pid_of(engine)
        with pytest.raises(EngineStartError, match=r"0\.3 s \(engine_start_timeout_seconds\)"):
            await starting
        assert engine.health().state == "failed"
        assert not Path(f"/proc/{pid}").exists()
        await engine.stop()

    asyncio.run(main())


def test_a_process_started_before_the_loop_is_the_one_that_serves() -> None:
    config = unit_config()
    started = EngineProcess.spawn(Configure(config, "error"))

    async def main() -> None:
        engine = ProcessEngine(config, log_level="error", started=started)
        await engine.start()
        assert engine.health().engine_pid == started.pid
        assert (await collect(engine, request("a", PROMPTS[0])))[-1].finish_reason is not None
        await engine.stop()
        assert not Path(f"/proc/{started.pid}").exists()

    asyncio.run(main())


def spawn_worker() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "etserve.engine.worker", "--fd", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.DEVNULL,
        )
    return process, ours


def test_killing_twice_does_not_lose_the_exit_code() -> None:
    async def main() -> None:
        process = EngineProcess.spawn(Configure(unit_config(), "error"))
        await process.connect()
        for _ in range(2000):
            process.kill()
        assert await process.end(5.0) == -signal.SIGKILL

    asyncio.run(main())


def test_an_engine_process_whose_parent_is_gone_ends() -> None:
    process, ours = spawn_worker()
    ours.close()
    assert process.wait(30) == 0


def test_an_engine_process_fed_with_garbage_ends_with_an_error() -> None:
    process, ours = spawn_worker()
    with ours:
        ours.sendall(b"\x00\x00\x00\x04junk")
        assert process.wait(30) != 0


def test_the_front_half_imports_no_torch() -> None:
    code = (
        "import sys, etserve.engine.process, etserve.engine.inprocess, etserve.engine.client, etserve.runner.grammar;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
