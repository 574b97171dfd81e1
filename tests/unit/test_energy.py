"""Joules from a made-up powercap folder."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from etserve.metrics.energy import EnergyCollector, EnergyMeter


def zone(root: Path, folder_name: str, microjoules: str, name: str = "package-0", largest: int = 1_000_000) -> Path:
    folder = root / folder_name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(microjoules)
    (folder / "max_energy_range_uj").write_text(f"{largest}\n")
    return folder / "energy_uj"


def exposition(meter: EnergyMeter) -> str:
    registry = CollectorRegistry()
    registry.register(EnergyCollector(meter))
    return generate_latest(registry).decode()


def test_packages_add_up_and_their_parts_are_not_counted_twice(tmp_path: Path) -> None:
    first = zone(tmp_path, "intel-rapl:0", "500\n")
    second = zone(tmp_path, "intel-rapl:1", "0\n", "package-1-die-0")
    part = zone(tmp_path, "intel-rapl:0:0", "0\n", "core")
    meter = EnergyMeter(tmp_path)
    assert meter.joules() == 0.0
    first.write_text("250500\n")
    second.write_text("500000\n")
    part.write_text("99999\n")
    assert meter.joules() == pytest.approx(0.75)
    assert "etserve_energy_joules_total 0.75" in exposition(meter)


def test_the_zone_of_the_whole_board_is_no_package(tmp_path: Path) -> None:
    package, board = zone(tmp_path, "intel-rapl:0", "0\n"), zone(tmp_path, "intel-rapl:1", "0\n", "psys")
    meter = EnergyMeter(tmp_path)
    package.write_text("250000\n")
    board.write_text("900000\n")
    assert meter.joules() == pytest.approx(0.25)


def test_a_machine_that_tells_of_its_board_alone_tells_of_no_package(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "0\n", "psys")
    (zone(tmp_path, "intel-rapl:1", "0\n").parent / "name").unlink()
    assert EnergyMeter(tmp_path).joules() is None


def test_a_counter_that_wraps_goes_on(tmp_path: Path) -> None:
    counter = zone(tmp_path, "intel-rapl:0", "900000\n")
    meter = EnergyMeter(tmp_path)
    counter.write_text("100000\n")
    assert meter.joules() == pytest.approx(0.2)
    counter.write_text("100001\n")
    assert meter.joules() == pytest.approx(0.200001)


def test_a_reading_that_fails_loses_nothing(tmp_path: Path) -> None:
    counter = zone(tmp_path, "intel-rapl:0", "0\n")
    meter = EnergyMeter(tmp_path)
    counter.write_text("gone\n")
    assert meter.joules() == 0.0
    counter.write_text("3000000\n")
    assert meter.joules() == pytest.approx(3.0)


@pytest.mark.parametrize("content", [None, "no number\n", ""])
def test_where_the_machine_does_not_tell_nothing_is_exported(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        zone(tmp_path, "intel-rapl:0", content)
    meter = EnergyMeter(tmp_path / "nowhere" if content is None else tmp_path)
    assert meter.joules() is None
    assert exposition(meter) == ""
