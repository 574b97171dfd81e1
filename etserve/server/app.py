"""Puts routes, state and edge together."""

from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from etserve import __version__
from etserve.config import ServerConfig
from etserve.engine.client import AsyncEngine
from etserve.errors import ConfigError
from etserve.metrics.recorder import Metrics
from etserve.server.auth import load_keys
from etserve.server.edge import Edge
from etserve.server.live import LiveFeed
from etserve.server.routes import ROUTERS
from etserve.server.state import ServerState

if TYPE_CHECKING:
    from etserve.server.rate_limits import RateLimits
    from etserve.server.tracing import Tracer


class _App(FastAPI):
    """FastAPI without its own error pages: exceptions go on to the edge, which is the only funnel."""

    def build_middleware_stack(self) -> ASGIApp:
        return AsyncExitStackMiddleware(self.router)


def create_app(config: ServerConfig, engine: AsyncEngine, registry: CollectorRegistry | None = None) -> Edge:
    """Make the ASGI app. Requests get 503 until `state_of(app).set_model` is called.

    Raises ConfigError for unusable API keys.
    """
    keys = load_keys(config)
    app = _App(
        title="etserve", version=__version__, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    for router in ROUTERS:
        app.include_router(router)
    paths = [route.path for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    metrics = Metrics(registry or CollectorRegistry(), compat=config.compat_metrics, routes=paths)
    metrics.watch(engine)
    engine.add_step_listener(metrics.on_step)
    live = LiveFeed(engine)
    engine.add_step_listener(live.on_step)
    app.state.etserve = ServerState(
        config=config, engine=engine, metrics=metrics, live=live, rate_limits=_rate_limits(config)
    )
    return Edge(app, config, keys, metrics, _tracer(config.otlp_endpoint))


def _rate_limits(config: ServerConfig) -> "RateLimits | None":
    """The limits library is imported here or nowhere."""
    if config.requests_per_minute is None and config.tokens_per_minute is None:
        return None
    from etserve.server.rate_limits import RateLimits

    return RateLimits(config)


def _tracer(endpoint: str | None) -> "Tracer | None":
    """OpenTelemetry's SDK is imported here or nowhere."""
    if endpoint is None:
        return None
    try:
        from etserve.server.tracing import Tracer
    except ImportError:
        raise ConfigError('otlp_endpoint needs OpenTelemetry: pip install "etserve[otel]"') from None
    return Tracer(endpoint)


def state_of(edge: Edge) -> ServerState:
    """The state behind an app made here."""
    state: ServerState = edge.app.state.etserve  # type: ignore[attr-defined]
    return state
