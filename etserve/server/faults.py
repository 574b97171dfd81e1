"""The one funnel from exceptions to OpenAI's error object. Nothing that was not written for the client passes it."""

import math
from dataclasses import dataclass, field

import msgspec
from starlette.exceptions import HTTPException

from etserve.errors import EngineUnavailableError, OverloadedError, RequestError
from etserve.outputs import SequenceOutput

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "service_unavailable",
}
_MESSAGES = {
    404: "There is no such route.",
    405: "This route does not take this method.",
    500: "The server had an error while processing the request.",
}
_REASONS = {401: "unauthorized", 404: "not_found", 405: "not_found", 408: "timeout", 413: "too_large", 431: "too_large"}

# Codes that an engine's error output may carry, and what the client reads.
_ENGINE_ERRORS = {
    "grammar": (400, "Nothing can follow that `response_format` allows, or its schema is too complex."),
    "model_numerics": (500, "The model produced numbers that are not finite."),
    "request_poisoned": (500, "The engine failed more than once while serving this request."),
    "engine_restarted": (503, "The engine failed and the request could not be continued. Try again."),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """What the client is told. `reason` is the metrics label, `headers` are added to the answer."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    reason: str = "invalid"
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """OpenAI's error object as JSON."""
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status, "invalid_request_error"),
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})


class HttpError(Exception):
    """Carries a fault up to the funnel."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


def http_error(
    status: int, message: str, *, code: str | None = None, headers: dict[str, str] | None = None
) -> HttpError:
    """Make the error of an HTTP status, with the metrics reason that belongs to it."""
    return HttpError(Fault(status, message, code=code, reason=_REASONS.get(status, "invalid"), headers=headers or {}))


def fault_of(error: BaseException) -> Fault:
    """Turn any exception into what may be said about it. An unknown one is a 500 with a fixed message."""
    if isinstance(error, HttpError):
        return error.fault
    if isinstance(error, RequestError):
        reason = "context_length" if error.code == "context_length_exceeded" else "invalid"
        return Fault(404 if error.code == "model_not_found" else 400, error.message, error.param, error.code, reason)
    if isinstance(error, OverloadedError):
        message = "The server is overloaded. Try again later."
        return Fault(429, message, None, "overloaded", "overloaded", retry_after(error.retry_after_seconds))
    if isinstance(error, EngineUnavailableError):
        message = "The server cannot take requests at the moment. Try again later."
        return Fault(503, message, None, "unavailable", "unavailable", retry_after(error.retry_after_seconds))
    if isinstance(error, HTTPException):
        headers = {k: v for k, v in (error.headers or {}).items() if k.lower() == "allow"}
        message = _MESSAGES.get(error.status_code, "The request cannot be served.")
        return Fault(error.status_code, message, None, None, _REASONS.get(error.status_code, "invalid"), headers)
    return Fault(500, _MESSAGES[500], None, "internal_error", "internal")


def fault_of_output(output: SequenceOutput) -> Fault | None:
    """Return the fault of a choice that ended in "error" or "abort", else None."""
    if output.finish_reason == "error":
        status, message = _ENGINE_ERRORS.get(output.error_code or "", (500, _MESSAGES[500]))
        headers = retry_after(1.0) if status == 503 else {}
        known = output.error_code if output.error_code in _ENGINE_ERRORS else "internal_error"
        return Fault(status, message, None, known, "invalid" if status == 400 else "internal", headers)
    if output.finish_reason == "abort":
        return Fault(503, "The request was ended by the server.", None, "aborted", "unavailable", retry_after(1.0))
    return None


def retry_after(seconds: float) -> dict[str, str]:
    """The header, in whole seconds of 1 to 3600."""
    return {"retry-after": str(max(1, math.ceil(min(seconds, 3600.0))))}
