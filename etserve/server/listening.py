"""Where the server listens, checked and bound before anything is started. Imports no web framework: it stays fast."""

import ipaddress
import socket

from etserve.config import ServerConfig
from etserve.errors import ConfigError
from etserve.server.auth import is_loopback, load_keys


def open_listener(config: ServerConfig) -> socket.socket:
    """Check the keys and the exposure, then bind. Raises ConfigError."""
    check_exposure(config)
    return bind(config)


def check_exposure(config: ServerConfig) -> None:
    """Refuse an address that others can reach when no key is set. Raises ConfigError."""
    keys = load_keys(config)
    if not config.insecure and not is_loopback(config.host) and not keys:
        raise ConfigError(
            f"host {config.host} is reachable from outside and no API key is set: "
            "set ETSERVE_API_KEYS or api_keys_file, or allow it with --insecure"
        )


def bind(config: ServerConfig) -> socket.socket:
    """Open the listening socket; port 0 takes a free one. Raises ConfigError with the system's reason."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(config.host).version == 6 else socket.AF_INET
    except ValueError:
        family = socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error.strerror or 'unknown host'}") from None
    listener.set_inheritable(False)
    return listener
