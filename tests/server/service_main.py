"""Runs the server with a fake engine, for the tests of its life cycle: `python -m tests.server.service_main JSON`."""

import json
import sys
from pathlib import Path

from etserve.config import Config, EngineConfig, ServerConfig
from etserve.errors import ConfigError, ModelError
from etserve.server import run
from etserve.tokenizer import Tokenizer, load_tokenizer
from etserve.tokenizer.loading import TokenizerFiles
from tests.fakes import UNIT_MODEL, FakeEngine


class DyingEngine(FakeEngine):
    """Fails for good as soon as the file exists."""

    trigger: Path | None = None

    def health(self):  # type: ignore[no-untyped-def]
        if self.trigger is not None and self.trigger.exists():
            self.state = "failed"
        return super().health()


def _load_quickly(files: TokenizerFiles, check_chat_template: bool = False) -> Tokenizer:
    """Without compiling the chat template, which would import transformers into every one of these processes."""
    return load_tokenizer(files)


def main() -> int:
    run.load_tokenizer = _load_quickly
    options = json.loads(sys.argv[1])
    fake = options.get("engine", {})
    start_error = fake.pop("start_error", None)
    trigger = fake.pop("trigger", None)
    engine = DyingEngine(**fake, start_error=ModelError(start_error) if start_error else None)
    engine.trigger = Path(trigger) if trigger else None
    config = Config(
        engine=EngineConfig(model=options.get("model", str(UNIT_MODEL))),
        server=ServerConfig(**{"port": 0, **options.get("server", {})}),
    )
    try:
        return run.serve(config, engine)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except ModelError as error:
        print(error, file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main())
