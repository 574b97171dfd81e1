"""Joules that the processors have used, where Linux tells (RAPL, powercap); nothing where it does not."""

from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

POWERCAP = Path("/sys/class/powercap")
NAME = "etserve_energy_joules"
HELP = "Energy of the processor packages since the server started, all programs together; absent where unknown."


class EnergyMeter:
    """Adds up what the package counters gain between readings; they wrap, after minutes to hours."""

    def __init__(self, root: Path = POWERCAP) -> None:
        """`root`: the folder of intel-rapl:N zones. Packages alone are read, lest anything count twice.

        A package includes its sub-zones (cores, memory); `psys`, where there is one, is the whole board.
        """
        zones = [zone for zone in sorted(root.glob("intel-rapl:*")) if _is_package(zone)]
        self._zones = [zone for zone in zones if _read(zone / "energy_uj") is not None]
        self._last = {zone: _read(zone / "energy_uj") or 0 for zone in self._zones}
        self._microjoules = 0

    def joules(self) -> float | None:
        """Since this meter was made; None where no counter can be read. Read it more often than a counter wraps."""
        if not self._zones:
            return None
        for zone in self._zones:
            now = _read(zone / "energy_uj")
            if now is None:  # for once: what it gained is counted next time
                continue
            gained = now - self._last[zone]
            if gained < 0:
                gained += _read(zone / "max_energy_range_uj") or -gained
            self._microjoules += gained
            self._last[zone] = now
        return self._microjoules * 1e-6


class EnergyCollector(Collector):
    """The meter at every scrape."""

    def __init__(self, meter: EnergyMeter) -> None:
        self._meter = meter

    def collect(self) -> Iterator[Metric]:
        joules = self._meter.joules()
        if joules is not None:
            family = CounterMetricFamily(NAME, HELP)
            family.add_metric([], joules)
            yield family


def _is_package(zone: Path) -> bool:
    """By the name that the kernel gives it: package-0, or package-0-die-1."""
    try:
        return (zone / "name").read_text(encoding="ascii").startswith("package-")
    except (OSError, ValueError):
        return False


def _read(path: Path) -> int | None:
    """A number of a sysfs file; None if it is missing, unreadable (root's alone on many systems) or no number."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
