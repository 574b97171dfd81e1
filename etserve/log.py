"""Structured logs: one JSON object a line on standard error. Never a prompt, an output or a key: callers log facts."""

import json
import logging
import sys
import time
from typing import Any, TextIO

_ROOT = "etserve"
_EVENT_LOOP = "asyncio"  # what it says goes the same way, its errors only: it warns of each write to a client that left


class _JsonFormatter(logging.Formatter):
    """Escapes every line break, so that no value can forge a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": _event(record),
        }
        entry.update(getattr(record, "facts", {}))
        if record.exc_info and record.exc_info[0] is not None:
            entry["error"] = record.exc_info[0].__name__
            entry["traceback"] = _frames(record.exc_info[2])
        return json.dumps(entry, ensure_ascii=True, default=str)


def _event(record: logging.LogRecord) -> str:
    """The event loop's first line only: below it stands the exception, message included."""
    text = record.getMessage()
    return text if record.name.startswith(_ROOT) else text.partition("\n")[0]


def _frames(trace: Any) -> list[str]:
    """Where an exception passed, without its message: messages may quote what a client sent."""
    places = []
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append(f"{code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    return places


class _QuietStreamHandler(logging.StreamHandler[TextIO]):
    """Counts lines that could not be written (full disk, closed pipe) instead of disturbing the caller."""

    num_dropped_lines = 0

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802 (logging's name)
        self.num_dropped_lines += 1


def configure(level: str = "info", stream: TextIO | None = None) -> None:
    """Send everything logged below "etserve" to `stream` (standard error), once, at `level` and above."""
    handler = _QuietStreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter())
    for name, least in ((_ROOT, level.upper()), (_EVENT_LOOP, "ERROR")):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(least)
        logger.propagate = False


def get_logger(name: str) -> logging.Logger:
    """The logger of one module; `name` is its `__name__`."""
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")


def log_facts(logger: logging.Logger, level: int, event: str, **facts: object) -> None:
    """Log `event` (a fixed phrase) with typed facts beside it."""
    logger.log(level, event, extra={"facts": facts})
