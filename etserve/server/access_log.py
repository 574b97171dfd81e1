"""One log line per request: what was asked for by route, what came of it, how long it took. Never what was said."""

import logging

from etserve.log import get_logger, log_facts
from etserve.server.record import GenerationRecord

# Asked every few seconds by probes and scrapers: at level debug, so that requests remain visible.
PROBES = frozenset({"/health", "/health/live", "/health/ready", "/metrics", "/load"})
_log = get_logger(__name__)


def log_request(
    *,
    request_id: str,
    client_id: str | None,
    method: str,
    route: str | None,
    status: int,
    seconds: float,
    record: GenerationRecord | None,
) -> None:
    """Log an answered request. `route` is the template that matched, None for none; `status` 0: no answer was begun."""
    level = logging.DEBUG if route in PROBES else logging.INFO
    if not _log.isEnabledFor(level):
        return
    facts: dict[str, object] = {"request": request_id}
    if client_id is not None:
        facts["client_request"] = client_id
    facts |= {"method": method, "route": route, "status": status, "seconds": round(seconds, 6)}
    if record is not None:
        facts |= {
            "first_token_seconds": _rounded(record.first_token_seconds),
            "prompt_tokens": record.num_prompt_tokens,
            "cached_tokens": record.num_cached_tokens,
            "output_tokens": record.num_output_tokens,
            "drafted_tokens": record.num_drafted_tokens,
            "accepted_tokens": record.num_accepted_tokens,
            "finish_reasons": record.finish_reasons,
        }
    log_facts(_log, level, "request", **facts)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
