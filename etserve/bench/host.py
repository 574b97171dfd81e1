"""Who used the CPU during a round, from /proc: the server's processes, this one, or somebody else."""

import contextlib
import os
import platform
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from etserve.bench.records import CpuShares

PROC = Path("/proc")
_LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class CpuSnapshot:
    """Clock ticks spent since boot."""

    total: int
    busy: int
    steal: int
    server: int | None
    client: int


def snapshot(server_pids: list[int], proc: Path = PROC) -> CpuSnapshot | None:
    """Now, or None where there is no /proc/stat. Without `server_pids` the server's part is unknown."""
    try:
        fields = [int(n) for n in (proc / "stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    user, nice, system, idle, iowait, irq, softirq, steal = (*fields, *[0] * (8 - len(fields)))
    busy = user + nice + system + irq + softirq + steal
    server = sum(_ticks(pid, proc) for pid in tree(server_pids, proc)) if server_pids else None
    return CpuSnapshot(busy + idle + iowait, busy, steal, server, _ticks(os.getpid(), proc))


def shares(before: CpuSnapshot | None, after: CpuSnapshot | None) -> CpuShares | None:
    """What happened between two snapshots, as shares of all cores."""
    if before is None or after is None or after.total <= before.total:
        return None
    total = after.total - before.total
    client = (after.client - before.client) / total
    busy = (after.busy - before.busy) / total
    server = None if before.server is None or after.server is None else max(0, after.server - before.server) / total
    return CpuShares(
        server=server,
        client=client,
        foreign=None if server is None else max(0.0, busy - server - client),
        steal=(after.steal - before.steal) / total,
        cores=os.cpu_count() or 1,
    )


def foreign_share(before: CpuSnapshot | None, after: CpuSnapshot | None) -> float | None:
    """Share of all cores that went to processes other than this one; None where it is not known."""
    if before is None or after is None or after.total <= before.total:
        return None
    return max(0, after.busy - before.busy - (after.client - before.client)) / (after.total - before.total)


def tree(pids: list[int], proc: Path = PROC) -> list[int]:
    """The processes and all their descendants, each once, as long as they live."""
    children: dict[int, list[int]] = {}
    for entry in proc.iterdir():
        if entry.name.isdigit():
            stat = _stat(int(entry.name), proc)
            if stat:
                children.setdefault(int(stat[1]), []).append(int(entry.name))
    found: list[int] = []
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.append(pid)
            waiting.extend(children.get(pid, []))
    return found


def peak_bytes(pids: list[int], proc: Path = PROC) -> int | None:
    """Sum of the peak resident sizes (VmHWM) of the processes and their descendants; shared pages count in each."""
    sizes = []
    for pid in tree(pids, proc) if pids else []:
        try:
            status = (proc / str(pid) / "status").read_text()
        except OSError:
            continue
        sizes += [int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")]
    return sum(sizes) if sizes else None


def listener_pids(url: str, proc: Path = PROC) -> list[int]:
    """The local process that listens on the URL's port; empty when the server is elsewhere or not ours to see."""
    parts = urlsplit(url)
    if not _is_local(parts.hostname or ""):
        return []
    port = parts.port or (443 if parts.scheme == "https" else 80)
    inodes = {f"socket:[{inode}]" for name in ("tcp", "tcp6") for inode in _listening(proc / "net" / name, port)}
    return [pid for pid in _pids(proc) if inodes & _sockets(proc / str(pid) / "fd")][:1] if inodes else []


def describe_machine() -> dict[str, Any]:
    """What a figure needs beside it."""
    model = ""
    try:
        lines = (PROC / "cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        pass
    return {
        "cpu": model or platform.processor(),
        "cores": os.cpu_count() or 1,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _is_local(host: str) -> bool:
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    return all(str(address).startswith("127.") or address == "::1" for address in addresses)


def _listening(table: Path, port: int) -> list[str]:
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:
        return []
    return [row[9] for row in rows if row[3] == _LISTEN and int(row[1].rsplit(":", 1)[1], 16) == port]


def _sockets(folder: Path) -> set[str]:
    found = set()
    try:
        for entry in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                found.add(os.readlink(entry))
    except OSError:  # the process is gone or another user's
        pass
    return found


def _pids(proc: Path) -> list[int]:
    return sorted(int(entry.name) for entry in proc.iterdir() if entry.name.isdigit())


def _stat(pid: int, proc: Path) -> list[str]:
    """Fields of /proc/PID/stat from the state on (the command may hold spaces and brackets)."""
    try:
        return (proc / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return []


def _ticks(pid: int, proc: Path) -> int:
    stat = _stat(pid, proc)
    return sum(int(n) for n in stat[11:15]) if stat else 0  # utime, stime, and those of children waited for
