"""CPU time is put down to the right processes, on a /proc written for the test and on the real one."""

import os
import socket
from pathlib import Path

import pytest

from etserve.bench import host


def fake_proc(folder: Path, jiffies: list[int], processes: dict[int, tuple[int, int]]) -> Path:
    """`processes`: pid -> (parent, ticks)."""
    (folder / "stat").write_text("cpu  " + " ".join(map(str, jiffies)) + " 0 0\ncpu0 0\n")
    for pid, (parent, ticks) in processes.items():
        (folder / str(pid)).mkdir(exist_ok=True)
        fields = ["S", str(parent), *["0"] * 9, str(ticks), "0", "0", "0"]
        (folder / str(pid) / "stat").write_text(f"{pid} (a) name) " + " ".join(fields))
        (folder / str(pid) / "status").write_text(f"Name: x\nVmHWM:\t{ticks} kB\n")
    return folder


def test_shares_split_the_machine_between_server_client_and_others(tmp_path: Path) -> None:
    me = os.getpid()
    before = host.snapshot(
        [10], fake_proc(tmp_path, [100, 0, 0, 900, 0, 0, 0, 0], {10: (1, 5), 11: (10, 5), me: (1, 3), 12: (1, 0)})
    )
    after = host.snapshot(
        [10], fake_proc(tmp_path, [180, 0, 0, 1000, 0, 0, 0, 20], {10: (1, 25), 11: (10, 35), me: (1, 13), 12: (1, 50)})
    )
    found = host.shares(before, after)
    assert found is not None
    assert found.server == pytest.approx(50 / 200)
    assert found.client == pytest.approx(10 / 200)
    assert found.foreign == pytest.approx((100 - 50 - 10) / 200)
    assert found.steal == pytest.approx(20 / 200)


def test_an_unknown_server_leaves_the_foreign_share_unknown(tmp_path: Path) -> None:
    before = host.snapshot([], fake_proc(tmp_path, [100, 0, 0, 900, 0, 0, 0, 0], {os.getpid(): (1, 0)}))
    after = host.snapshot([], fake_proc(tmp_path, [150, 0, 0, 950, 0, 0, 0, 0], {os.getpid(): (1, 10)}))
    found = host.shares(before, after)
    assert found is not None
    assert found.server is found.foreign is None
    assert found.client == pytest.approx(0.1)


def test_a_system_without_proc_has_no_shares(tmp_path: Path) -> None:
    assert host.snapshot([], tmp_path / "absent") is None
    assert host.shares(None, None) is None


def test_peak_memory_sums_over_the_descendants(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path, [0] * 8, {10: (1, 100), 11: (10, 20), 12: (11, 3), 13: (1, 1000)})
    assert sorted(host.tree([10], proc)) == [10, 11, 12]
    assert host.peak_bytes([10], proc) == 123 * 1024
    assert host.peak_bytes([], proc) is None


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc")
def test_the_listener_of_a_local_port_is_found() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert host.listener_pids(f"http://127.0.0.1:{port}") == [os.getpid()]
    assert host.listener_pids(f"http://127.0.0.1:{port}") == []
    assert host.listener_pids("http://192.0.2.1:80") == []


def test_the_machine_is_described() -> None:
    described = host.describe_machine()
    assert described["cores"] >= 1
    assert set(described) == {"cpu", "cores", "kernel", "python"}
