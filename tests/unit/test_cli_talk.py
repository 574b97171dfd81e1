"""Generate and chat, with a fake engine behind them; chat and healthcheck against a small server."""

import asyncio
import io
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from etserve.cli import chat
from etserve.cli.local import LocalModel
from etserve.cli.main import run
from etserve.errors import EngineUnavailableError, PromptTooLongError, RequestError
from etserve.outputs import GenerateRequest, SequenceOutput
from etserve.sampling_params import SamplingParams
from tests.unit.bench_helpers import FakeServer, serving, unit_tokenizer

UNIT_MODEL = str(Path(__file__).parents[1] / "data" / "unit_model")
Capture = pytest.CaptureFixture[str]


class EchoEngine:
    """Answers with the prompt's own text, a token at a time."""

    def __init__(self, *_: object, start_error: Exception | None = None, text: str | None = None) -> None:
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.is_stopped = False
        self._start_error = start_error
        self._text = text

    async def start(self) -> Any:
        if self._start_error is not None:
            raise self._start_error
        return type("Info", (), {"model_name": "echo"})()

    def generate(self, request: GenerateRequest) -> AsyncIterator[SequenceOutput]:
        if len(request.prompt_token_ids) > 1000:
            raise PromptTooLongError(len(request.prompt_token_ids), 1000)
        self.requests.append(request)
        return self._stream(request)

    async def _stream(self, request: GenerateRequest) -> AsyncIterator[SequenceOutput]:
        text = self._text if self._text is not None else unit_tokenizer().decode(request.prompt_token_ids)
        for letter in text[: request.params.max_tokens]:
            await asyncio.sleep(0.001)
            yield SequenceOutput(request_id=request.request_id, text=letter)
        last = ("error", "model_numerics") if text == "!" else ("stop", None)
        yield SequenceOutput(request_id=request.request_id, finish_reason=last[0], error_code=last[1])  # type: ignore[arg-type]

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def stop(self) -> None:
        self.is_stopped = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> EchoEngine:
    echo = EchoEngine()
    monkeypatch.setattr("etserve.engine.process.ProcessEngine", lambda config, **_: echo)
    return echo


def answers(console: Console, lines: list[str], reply: chat.Reply, monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter(lines)

    def typed(prompt: str = "") -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    chat.converse(console, reply, "be brief")


def test_generate_prints_nothing_but_the_text(engine: EchoEngine, capsys: Capture) -> None:
    assert (
        run(["generate", "some words", "--model", UNIT_MODEL, "--max-tokens", "4", "--seed", "3", "--stop", "zz"]) == 0
    )
    assert capsys.readouterr().out == "some\n"
    params = engine.requests[0].params
    assert (params.max_tokens, params.temperature, params.seed, params.stop) == (4, 0.0, 3, ("zz",))
    assert engine.is_stopped


def test_generate_reads_the_prompt_from_standard_input(
    engine: EchoEngine, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert run(["generate", "-", "-m", UNIT_MODEL]) == 0
    assert capsys.readouterr().out == "from a pipe\n"


def test_a_prompt_beyond_the_context_is_said_in_one_line(engine: EchoEngine, capsys: Capture) -> None:
    assert run(["generate", "x" * 2000, "-m", UNIT_MODEL]) == 2
    assert "maximum context length is 1000" in capsys.readouterr().err
    assert engine.is_stopped


def test_an_engine_that_cannot_start_is_stopped_and_told(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    broken = EchoEngine(start_error=EngineUnavailableError("it would not start"))
    monkeypatch.setattr("etserve.engine.process.ProcessEngine", lambda config, **_: broken)
    assert run(["generate", "x", "-m", UNIT_MODEL]) == 70
    assert capsys.readouterr().err.splitlines()[-1] == "etserve: it would not start"
    assert broken.is_stopped


def test_an_engine_that_gives_up_midway_is_told(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("etserve.engine.process.ProcessEngine", lambda config, **_: EchoEngine(text="!"))
    assert run(["generate", "x", "-m", UNIT_MODEL]) == 70
    assert "model_numerics" in capsys.readouterr().err


def test_leaving_a_stream_early_aborts_the_request() -> None:
    echo = EchoEngine(text="x" * 100_000)
    with LocalModel(echo, unit_tokenizer()) as local:  # type: ignore[arg-type]
        pieces = local.stream([1], SamplingParams())
        next(pieces)
        pieces.close()  # type: ignore[attr-defined]
        done = threading.Event()
        local._loop.call_soon_threadsafe(done.set)
        assert done.wait(5)
    assert echo.aborted == ["cli-1"]


def test_chat_keeps_the_conversation_until_exit(
    engine: EchoEngine, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = iter(["first words", "", "second words", "/exit", "never read"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(typed))
    assert run(["chat", UNIT_MODEL, "--max-tokens", "5", "--system", "be brief"]) == 0
    first, second = (unit_tokenizer().decode(request.prompt_token_ids) for request in engine.requests)
    assert "be brief" in first
    assert "first words" in first
    assert "second words" not in first
    assert "first words" in second
    assert "second words" in second
    assert next(typed) == "never read"


def test_clear_forgets_all_but_the_system_message(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[chat.Messages] = []

    def reply(messages: chat.Messages) -> Iterator[str]:
        seen.append(list(messages))
        yield "yes"

    answers(Console(file=io.StringIO()), ["one", "/clear", "two", "/what"], reply, monkeypatch)
    assert [[m["content"] for m in messages] for messages in seen] == [["be brief", "one"], ["be brief", "two"]]


def test_a_refused_message_leaves_the_conversation_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def reply(messages: chat.Messages) -> Iterator[str]:
        seen.append(len(messages))
        if len(seen) == 2:
            raise RequestError("too long")
        yield "yes"

    screen = io.StringIO()
    answers(Console(file=screen), ["one", "two", "three"], reply, monkeypatch)
    assert seen == [2, 4, 4]
    assert "too long" in screen.getvalue()


def test_ctrl_c_ends_an_answer_but_not_the_conversation(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    seen: list[chat.Messages] = []

    def reply(messages: chat.Messages) -> Iterator[str]:
        seen.append(list(messages))
        yield "half an answer"
        raise KeyboardInterrupt

    answers(Console(file=io.StringIO()), ["one", "two"], reply, monkeypatch)
    assert seen[1][-2] == {"role": "assistant", "content": "half an answer"}
    assert "half an answer …" in capsys.readouterr().out


def test_chat_talks_to_a_running_server(capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    typed = iter(["hello", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(typed))
    with serving(FakeServer()) as server:
        arguments = ["chat", "--url", server.url, "--max-tokens", "6", "--api-key-file", str(tmp_path / "key")]
        assert run(arguments) == 0
    assert "xxxxxx" in capsys.readouterr().out
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert server.bodies[0]["max_tokens"] == 6


@pytest.mark.parametrize(("fault", "message"), [("error", "broken"), ("refuse", "too busy")])
def test_a_server_that_fails_is_told_in_its_own_words(
    fault: str, message: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda prompt="": "hello")
    with serving(FakeServer(faults={0: fault})) as server:
        assert run(["chat", "--url", server.url, "--max-tokens", "2"]) == 70
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("path", "code"), [("/ready", 0), ("/starting", 1)])
def test_healthcheck_tells_readiness_by_its_exit_code(path: str, code: int, capsys: Capture) -> None:
    from aiohttp import web

    class Health(FakeServer):
        def app(self) -> web.Application:
            app = web.Application()
            app.router.add_get("/ready/health/ready", answer(200))
            app.router.add_get("/starting/health/ready", answer(503))
            return app

    def answer(status: int) -> Callable[[web.Request], Any]:
        async def handler(request: web.Request) -> web.Response:
            return web.Response(status=status)

        return handler

    with serving(Health()) as server:
        assert run(["healthcheck", "--url", server.url + path]) == code
    assert run(["healthcheck", "--url", server.url + path]) == 1
    assert "does not answer" in capsys.readouterr().err
