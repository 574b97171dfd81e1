"""A running server seen from the terminal, by the standard library's HTTP client."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

from etserve.errors import ConfigError, EngineUnavailableError, RequestError

TIMEOUT_SECONDS = 300.0


class RemoteChat:
    """Chat completions of one server. Raises EngineUnavailableError when it cannot be reached."""

    def __init__(self, url: str, *, model: str | None = None, api_key_file: Path | None = None) -> None:
        self._root = checked_url(url).removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key_file is not None:
            self._headers["Authorization"] = f"Bearer {_read_key(api_key_file)}"
        self.model = model or self._first_model()

    def reply(self, messages: list[dict[str, str]], options: Mapping[str, Any]) -> Iterator[str]:
        """Yield the answer's text as it comes. Raises RequestError with the server's words for a refusal."""
        body = {"model": self.model, "messages": messages, "stream": True}
        body |= {name: value for name, value in options.items() if value is not None}
        with self._open("/v1/chat/completions", body) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    return
                event = json.loads(payload)
                if event.get("error"):
                    raise EngineUnavailableError(f"the server gave up: {_message(event)}")
                for choice in event.get("choices", ()):
                    yield choice.get("delta", {}).get("content") or ""

    def _first_model(self) -> str:
        with self._open("/v1/models") as response:
            listed = json.load(response)
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise EngineUnavailableError(f"{self._root} lists no model") from None

    def _open(self, path: str, body: Mapping[str, Any] | None = None) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._root + path, data=data, headers=self._headers)  # noqa: S310 (checked)
        try:
            opened: HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)  # noqa: S310
            return opened
        except urllib.error.HTTPError as error:
            with error:
                message = _message(_json(error.read(65_536))) or f"HTTP {error.code}"
            if error.code in (400, 401, 404, 413):
                raise RequestError(message) from None
            raise EngineUnavailableError(message) from None
        except (OSError, HTTPException) as error:
            raise EngineUnavailableError(f"{self._root} cannot be reached: {getattr(error, 'reason', error)}") from None


def checked_url(url: str) -> str:
    """The URL without a trailing slash. Raises ConfigError unless it is http or https."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"the URL must begin with http:// or https://, got {url!r}")
    return url.rstrip("/")


def status_of(url: str, timeout_seconds: float, host: str | None = None) -> int | None:
    """HTTP status of a GET, under another Host name if one is given; None when nobody answers in time."""
    headers = {} if host is None else {"Host": host}
    request = urllib.request.Request(checked_url(url), headers=headers)  # noqa: S310 (checked)
    try:
        with urllib.request.urlopen(request, timeout=timeout_seconds) as response:  # noqa: S310 (checked)
            status: int = response.status
            return status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except (OSError, HTTPException):
        return None


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


def _message(value: Any) -> str:
    error = value.get("error") if isinstance(value, dict) else None
    return str(error.get("message", "")) if isinstance(error, dict) else ""


def _read_key(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").split()[0]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (IndexError, UnicodeDecodeError):
        raise ConfigError(f"{path}: holds no API key") from None
