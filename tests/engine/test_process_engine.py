"""The engine process may be killed, stopped or fed nonsense: streams go on or end with a reason; nothing is left."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from etserve.engine.process import ProcessEngine
from etserve.engine.streams import merge
from etserve.errors import ConfigError, EngineUnavailableError, ModelError
from etserve.outputs import GenerateRequest, SequenceOutput, StepStats
from tests.engine.helpers import PROMPTS, UNIT_MODEL, make_engine, request, run, unit_config


def go(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60.0))


@asynccontextmanager
async def started(**settings: Any) -> AsyncIterator[ProcessEngine]:
    engine = ProcessEngine(unit_config(), log_level="error", first_backoff_seconds=0.05, **settings)
    await engine.start()
    pids = {engine.health().engine_pid}
    try:
        yield engine
    finally:
        pids.add(engine.health().engine_pid)
        await engine.stop()
        await engine.stop()
        for pid in pids - {None}:
            assert not Path(f"/proc/{pid}").exists()


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
    undisturbed: dict[tuple[str, int], SequenceOutput],
) -> None:
    async def main() -> None:
        async with started() as engine:
            streams = await asyncio.gather(*(collect(engine, item) for item in mixed()))
            check_streams(streams, undisturbed)
            assert engine.load().num_running == 0
            assert engine.load().kv_usage_ratio == 0.0

    go(main())


def test_streams_survive_a_killed_engine_with_the_same_tokens(
    undisturbed: dict[tuple[str, int], SequenceOutput],
) -> None:
    async def main() -> None:
        async with started() as engine:
            readers = [asyncio.create_task(collect(engine, item)) for item in mixed()]
            await until_tokens(engine, 40)
            before = pid_of(engine)
            os.kill(before, signal.SIGKILL)
            check_streams(list(await asyncio.gather(*readers)), undisturbed)
            assert pid_of(engine) != before
            assert engine.health().num_restarts == 1
            assert engine.health().is_ready

    go(main())


def test_a_request_that_was_there_at_two_deaths_is_given_up() -> None:
    async def main() -> None:
        async with started() as engine:
            reader = asyncio.create_task(collect(engine, request("r", PROMPTS[0], max_tokens=1500, ignore_eos=True)))
            for _ in range(2):
                await until_tokens(engine, 5)
                os.kill(pid_of(engine), signal.SIGKILL)
                while engine.health().is_ready:
                    await asyncio.sleep(0.01)
            last = (await reader)[-1]
            assert (last.finish_reason, last.error_code) == ("error", "request_poisoned")
            while not engine.health().is_ready:
                await asyncio.sleep(0.05)
            assert (await collect(engine, request("next", PROMPTS[0])))[-1].finish_reason == "length"

    go(main())


def test_while_the_engine_restarts_requests_are_refused_and_aborts_end_at_once() -> None:
    async def main() -> None:
        async with started() as engine:
            reader = asyncio.create_task(collect(engine, request("r", PROMPTS[0], max_tokens=1500, ignore_eos=True)))
            await until_tokens(engine, 5)
            os.kill(pid_of(engine), signal.SIGKILL)
            while engine.health().state != "restarting":
                await asyncio.sleep(0.01)
            with pytest.raises(EngineUnavailableError):
                engine.generate(request("new", PROMPTS[0]))
            engine.abort("r")
            assert (await reader)[-1].finish_reason == "abort"

    go(main())


def test_a_hanging_engine_is_not_ready_then_killed_and_replaced(
    undisturbed: dict[tuple[str, int], SequenceOutput],
) -> None:
    async def main() -> None:
        async with started(hung_seconds=0.5, kill_after_seconds=1.5) as engine:
            readers = [asyncio.create_task(collect(engine, item)) for item in mixed()]
            await until_tokens(engine, 20)
            before = pid_of(engine)
            os.kill(before, signal.SIGSTOP)
            while engine.health().is_ready:
                await asyncio.sleep(0.01)
            assert pid_of(engine) == before
            check_streams(list(await asyncio.gather(*readers)), undisturbed)
            assert pid_of(engine) != before

    go(main())


def test_an_engine_that_dies_again_and_again_fails_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with started() as engine:
            engine._first_backoff_seconds = 0.0
            monkeypatch.setenv("PYTHONPATH", "/nowhere")
            monkeypatch.setattr("etserve.engine.process.sys.executable", shutil.which("false"))
            reader = asyncio.create_task(collect(engine, request("r", PROMPTS[0], max_tokens=1500, ignore_eos=True)))
            await until_tokens(engine, 1)
            os.kill(pid_of(engine), signal.SIGKILL)
            assert "died" in await engine.wait_failed()
            last = (await reader)[-1]
            assert (last.finish_reason, last.error_code) == ("error", "engine_restarted")
            assert engine.health().state == "failed"
            with pytest.raises(EngineUnavailableError):
                engine.generate(request("new", PROMPTS[0]))

    go(main())


def test_closing_an_iterator_frees_the_engine_within_steps() -> None:
    async def main() -> None:
        async with started() as engine:
            iterator = engine.generate(request("r", PROMPTS[0], max_tokens=1500, ignore_eos=True))
            assert (await anext(iterator)).token_ids
            last: list[StepStats] = []
            engine.add_step_listener(lambda stats, _: last.append(stats))
            await iterator.aclose()
            while not last or last[-1].kv_blocks_active:
                await asyncio.sleep(0.01)
            assert await engine.drain(1.0)

    go(main())


def test_stop_ends_open_requests_with_abort() -> None:
    async def main() -> None:
        async with started() as engine:
            reader = asyncio.create_task(collect(engine, request("r", PROMPTS[0], max_tokens=1500, ignore_eos=True)))
            await until_tokens(engine, 3)
            await engine.stop()
            assert (await reader)[-1].finish_reason == "abort"

    go(main())


def broken_model(folder: Path) -> str:
    shutil.copytree(UNIT_MODEL, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return str(folder)


@pytest.mark.parametrize("case", ["no such path", "truncated", "wrong setting"])
def test_a_start_that_cannot_succeed_raises_in_one_line(case: str, tmp_path: Path) -> None:
    async def main() -> None:
        error: type[Exception] = ModelError
        if case == "no such path":
            config = unit_config(model=str(tmp_path / "none"))
        elif case == "truncated":
            config = unit_config(model=broken_model(tmp_path / "model"))
        else:
            config, error = unit_config(max_model_len=1_000_000), ConfigError
        engine = ProcessEngine(config, log_level="error")
        with pytest.raises(error) as caught:
            await engine.start()
        assert "\n" not in str(caught.value)
        if case != "wrong setting":
            assert str(tmp_path) in str(caught.value)
        assert engine.health().state == "failed"
        assert engine.health().engine_pid is None
        await engine.stop()

    go(main())


def spawn_worker() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "etserve.engine.worker", "--fd", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.DEVNULL,
        )
    return process, ours


def test_an_engine_process_whose_parent_is_gone_ends() -> None:
    process, ours = spawn_worker()
    ours.close()
    assert process.wait(30) == 0


def test_an_engine_process_fed_with_garbage_ends_with_an_error() -> None:
    process, ours = spawn_worker()
    with ours:
        ours.sendall(b"\x00\x00\x00\x04junk")
        assert process.wait(30) != 0


def test_signals_meant_for_the_group_do_not_end_the_engine() -> None:
    async def main() -> None:
        async with started() as engine:
            for name in (signal.SIGINT, signal.SIGTERM):
                os.kill(pid_of(engine), name)
            assert (await collect(engine, request("r", PROMPTS[0])))[-1].finish_reason == "length"
            assert engine.health().num_restarts == 0

    go(main())


def test_the_front_half_imports_no_torch() -> None:
    code = (
        "import sys, etserve.engine.process, etserve.engine.inprocess, etserve.engine.client, etserve.runner.grammar;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_starting_and_stopping_leaves_no_open_files() -> None:
    async def once() -> None:
        async with started() as engine:
            await collect(engine, request("r", PROMPTS[2], max_tokens=2))

    def num_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    go(once())
    before = num_files()
    go(once())
    time.sleep(0.1)
    assert num_files() <= before
