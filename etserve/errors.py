"""Faults, by whose they are. A client's fault carries what the client may read; nothing else leaves the server."""


class EtserveError(Exception):
    """Root of everything that etserve raises on purpose."""


class ConfigError(EtserveError):
    """A setting is wrong: the start stops with exit code 2."""


class ModelError(EtserveError):
    """Weights, tokenizer or model config are wrong: the start stops with exit code 3.

    The message is one line that names the file and, where there is one, the tensor.
    """


class EngineStartError(EtserveError):
    """The engine did not get ready in time: the start stops with exit code 70."""


class RequestError(EtserveError):
    """The client's request cannot be served as it stands (HTTP 400).

    `message` is written by us for the client; `param` names the field, `code` is OpenAI's machine-readable code.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class PromptTooLongError(RequestError):
    """The prompt and the tokens asked for do not fit into the context."""

    def __init__(self, num_tokens: int, max_model_len: int) -> None:
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens, the request needs {num_tokens}.",
            param="messages",
            code="context_length_exceeded",
        )


class OverloadedError(EtserveError):
    """The queue is full (HTTP 429); `retry_after_seconds` is an honest estimate."""

    def __init__(self, reason: str, retry_after_seconds: float) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


class EngineUnavailableError(EtserveError):
    """The engine is starting, draining or dead (HTTP 503)."""

    def __init__(self, reason: str, retry_after_seconds: float = 1.0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds
