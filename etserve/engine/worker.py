"""The engine process: `python -m etserve.engine.worker --fd N`, N being its end of the socket pair."""

import argparse
import gc
import logging
import os
import signal
import socket
import sys

from etserve import log
from etserve.engine.frames import Configure, EngineChannel, Ready, StartFailed, StepDone
from etserve.errors import ConfigError, ModelError
from etserve.models.files import resolve_model

_log = log.get_logger(__name__)
# Threads of libraries must not spin beside our own kernels'; said before torch is imported.
_THREAD_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}


def main() -> int:
    """Return the exit code: 0 after Shutdown or the front end's end, 1 if the engine could not start."""
    gc.disable()  # until the model is loaded: what imports and loading make stays anyway
    parser = argparse.ArgumentParser(prog="etserve.engine.worker")
    parser.add_argument("--fd", type=int, required=True)
    channel = EngineChannel(socket.socket(fileno=parser.parse_args().fd))
    for name in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group: the front end decides when we end
        signal.signal(name, signal.SIG_IGN)
    for key, value in _THREAD_ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    try:
        return _serve(channel)
    except (EOFError, ConnectionError):
        log.log_facts(_log, logging.WARNING, "front end is gone")
        return 0


def _serve(channel: EngineChannel) -> int:
    first = channel.receive(wait=True)[0]
    if not isinstance(first, Configure):
        raise TypeError(f"the first message must configure the engine, got {type(first).__name__}")
    log.configure(first.log_level)
    try:
        resolve_model(first.config.model)  # a wrong name is known before torch is loaded
        from etserve.engine.building import build_engine

        engine = build_engine(first.config)
    except (ConfigError, ModelError) as error:
        message = " ".join(str(error).split())
        channel.send(StartFailed("config" if isinstance(error, ConfigError) else "model", message))
        return 1
    from etserve.engine.loop import run_engine

    gc.collect()
    gc.freeze()  # what was loaded lives on: no collection need look at it again
    gc.enable()
    channel.send(Ready(engine.info))

    def send(report: StepDone) -> None:
        channel.send(report)

    run_engine(engine, lambda wait: channel.receive(wait=wait), send)
    return 0


if __name__ == "__main__":
    sys.exit(main())
