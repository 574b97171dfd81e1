"""Where the time of a decoder's calls goes, if the decoder can tell."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from etserve.models.types import Decoder


@runtime_checkable
class MeasuresPhases(Protocol):
    """The native decoder: see NativeDecoder."""

    def measure_phases(self, is_on: bool) -> None: ...

    def take_phases(self) -> dict[str, float]: ...


@contextmanager
def measured(decoder: Decoder) -> Iterator[dict[str, float]]:
    """Seconds by phase of the calls within, filled in at the end; empty for a decoder that cannot tell."""
    found: dict[str, float] = {}
    if not isinstance(decoder, MeasuresPhases):
        yield found
        return
    decoder.measure_phases(True)
    decoder.take_phases()
    try:
        yield found
    finally:
        found.update(decoder.take_phases())
        decoder.measure_phases(False)
