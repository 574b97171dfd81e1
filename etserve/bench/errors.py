"""The load generator's own fault."""

from etserve.errors import ConfigError


class BenchError(ConfigError):
    """A benchmark cannot be run as asked: the command stops with exit code 2 and one line."""
