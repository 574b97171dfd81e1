"""Who may ask: API keys and Host headers."""

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable
from pathlib import Path

from etserve.config import ServerConfig
from etserve.errors import ConfigError

MIN_KEY_CHARACTERS = 8
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252}))(?::[0-9]{1,5})?", re.ASCII)
_KEY = re.compile(r"[\x21-\x7e]+")
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


class ApiKeys:
    """Hashes of the keys in force; the keys themselves are not kept."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def match(self, presented: str) -> bytes | None:
        """Return the digest of the key that was presented if it is one of ours.

        Every key is compared, in constant time each, so that the time tells nothing about which came close.
        """
        digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest()
        found = None
        for known in self._digests:
            if hmac.compare_digest(known, digest):
                found = known
        return found


def load_keys(config: ServerConfig) -> ApiKeys:
    """Collect the keys of file and environment. Raises ConfigError on an unreadable file or an unusable key."""
    keys = list(config.api_keys)
    if config.api_keys_file is not None:
        try:
            lines = Path(config.api_keys_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            raise ConfigError(f"api_keys_file cannot be read: {config.api_keys_file}") from None
        from_file = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not from_file:
            raise ConfigError(f"api_keys_file holds no key: {config.api_keys_file}")
        keys.extend(from_file)
    for key in keys:
        if len(key) < MIN_KEY_CHARACTERS or _KEY.fullmatch(key) is None:
            raise ConfigError(f"an API key must be at least {MIN_KEY_CHARACTERS} printable ASCII characters, no spaces")
    return ApiKeys(keys)


def presented_key(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Read the key off `Authorization: Bearer` or `x-api-key`; None where there is none or they are ambiguous."""
    found: set[str] = set()
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() != b"bearer":
                return None
            found.add(token.strip().decode("latin-1"))
        elif name == b"x-api-key":
            found.add(value.strip().decode("latin-1"))
    return found.pop() if len(found) == 1 else None


def cache_salt(key_digest: bytes | None, requested: str | None) -> bytes:
    """Salt of the prefix cache: clients with different keys, or different wishes, share no block."""
    if key_digest is None and requested is None:
        return b""
    return hashlib.sha256(b"etserve-cache\0" + (key_digest or b"") + b"\0" + (requested or "").encode()).digest()


def is_loopback(host: str) -> bool:
    """Whether an address to bind is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class HostRule:
    """Which Host headers are answered.

    Without an allow-list: any well-formed host; but a server that needs no key and listens on loopback only answers
    to loopback names, so that a web page cannot reach it by rebinding its own name (Ollama GHSA-5jx5-hqx5-2vrj).
    """

    def __init__(self, config: ServerConfig, *, has_keys: bool) -> None:
        allowed = config.allowed_hosts
        if not allowed and not has_keys and is_loopback(config.host):
            allowed = (*LOOPBACK_NAMES, config.host)
        self._allowed = None if not allowed or "*" in allowed else frozenset(name.lower() for name in allowed)

    def allows(self, hosts: list[bytes]) -> bool:
        """Check the Host header's values: exactly one, well-formed, and on the list."""
        if len(hosts) != 1:
            return False
        host = hosts[0].decode("latin-1").lower()
        if _HOST.fullmatch(host) is None:
            return False
        name = re.sub(r":[0-9]+\Z", "", host) if not host.endswith("]") else host
        return self._allowed is None or name in self._allowed or host in self._allowed
