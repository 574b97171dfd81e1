"""What the routes of one server share."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from etserve.config import ServerConfig
from etserve.engine.client import AsyncEngine
from etserve.errors import EngineUnavailableError
from etserve.metrics.recorder import Metrics
from etserve.outputs import ModelInfo
from etserve.server.live import LiveFeed
from etserve.server.prompts import PromptEncoder
from etserve.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from etserve.server.rate_limits import RateLimits


@dataclass(slots=True)
class LoadedModel:
    """What is known once the engine is ready."""

    info: ModelInfo
    encoder: PromptEncoder

    @property
    def tokenizer(self) -> Tokenizer:
        return self.encoder.tokenizer


@dataclass(slots=True)
class ServerState:
    """Set up before the first request; `model` is set once when loading has ended, `is_draining` once at the end."""

    config: ServerConfig
    engine: AsyncEngine
    metrics: Metrics
    live: LiveFeed
    rate_limits: "RateLimits | None" = None  # None: no limit is set
    model: LoadedModel | None = None
    is_draining: bool = False  # not ready any more
    is_refusing: bool = False  # the drain delay is over: no new request
    created: int = field(default_factory=lambda: int(time.time()))

    def set_model(self, info: ModelInfo, tokenizer: Tokenizer) -> None:
        """Open the doors: requests are answered from now on."""
        self.metrics.started(info)
        self.model = LoadedModel(info, PromptEncoder(tokenizer, info.vocab_size, info.max_model_len))

    def ready_model(self) -> LoadedModel:
        """Return the model, or raise EngineUnavailableError while it loads or the server drains."""
        if self.model is None:
            raise EngineUnavailableError("the model is loading", 5.0)
        if self.is_refusing:
            raise EngineUnavailableError("the server is draining", 5.0)
        return self.model

    def readiness(self) -> str | None:
        """None when ready, else the reason in one word."""
        if self.is_draining:
            return "draining"
        if self.model is None:
            return "loading"
        health = self.engine.health()
        return None if health.is_ready else health.state if health.state != "ready" else "stalled"
