"""Logs are one JSON object a line, whatever is in them."""

import contextlib
import io
import json
import logging

import pytest

from etserve import log


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture(autouse=True)
def _restore() -> object:
    loggers = [logging.getLogger(name) for name in ("etserve", "asyncio")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.level, logger.propagate = handlers, level, propagate


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_facts_become_fields_and_no_value_can_forge_a_line(stream: io.StringIO) -> None:
    log.configure("info", stream)
    log.log_facts(log.get_logger("etserve.x"), logging.INFO, "started", path='a\n{"level": "fake"}', count=3)
    (entry,) = lines(stream)
    assert (entry["event"], entry["level"], entry["count"]) == ("started", "info", 3)
    assert entry["path"] == 'a\n{"level": "fake"}'


def test_an_exception_is_logged_by_place_and_type_without_its_message(stream: io.StringIO) -> None:
    log.configure("info", stream)
    try:
        raise ValueError("what the client wrote")
    except ValueError:
        log.get_logger("x").exception("rendering failed")
    (entry,) = lines(stream)
    assert entry["error"] == "ValueError"
    assert "test_log.py" in str(entry["traceback"])
    assert "client wrote" not in stream.getvalue()


def test_the_event_loops_errors_are_json_too_and_tell_no_message(stream: io.StringIO) -> None:
    log.configure("info", stream)
    logger = logging.getLogger("asyncio")
    logger.warning("socket.send() raised exception.")
    logger.error("Task exception was never retrieved\nfuture: <Task exception=ValueError('what the client wrote')>")
    (entry,) = lines(stream)
    assert (entry["event"], entry["logger"]) == ("Task exception was never retrieved", "asyncio")


def test_below_the_level_nothing_is_written_and_configuring_twice_writes_once(stream: io.StringIO) -> None:
    log.configure("info", stream)
    log.configure("warning", stream)
    logger = log.get_logger("etserve.x")
    logger.info("quiet")
    logger.warning("loud")
    assert [entry["event"] for entry in lines(stream)] == ["loud"]


def test_a_stream_that_cannot_be_written_disturbs_nobody() -> None:
    with open("/dev/full", "w", buffering=1) as full:
        log.configure("info", full)
        log.get_logger("etserve.x").warning("lost")
        handler = logging.getLogger("etserve").handlers[0]
        assert handler.num_dropped_lines == 1  # type: ignore[attr-defined]
        with contextlib.suppress(OSError):
            full.close()
