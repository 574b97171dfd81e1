"""The output folder: one JSON file per finished piece of work, so that a comparison can be interrupted and taken up."""

import hashlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from etserve.bench.ablate.records import QualityRun, RoundRun
from etserve.bench.errors import BenchError
from etserve.config import ControlConfig

T = TypeVar("T", RoundRun, QualityRun, ControlConfig)
MANIFEST = "manifest.json"


class Store:
    """Files of one comparison. Everything in it was asked for by the same manifest."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Raises BenchError when the folder holds another comparison, or cannot be written."""
        self.folder = folder
        self._runs = folder / "runs"
        wanted = msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=2)
        path = folder / MANIFEST
        try:
            self._runs.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                _write(path, wanted)
            elif path.read_bytes() != wanted:
                raise BenchError(f"{folder} holds a comparison with other settings: choose another folder")
        except OSError as error:
            raise BenchError(f"{folder}: {error.strerror}") from None

    def control(self) -> ControlConfig | None:
        """The settings that all arms share; None: not settled yet."""
        return self._read(self.folder / "control.json", ControlConfig)

    def set_control(self, control: ControlConfig) -> None:
        _write(self.folder / "control.json", msgspec.json.encode(control))

    def round(self, arm: str, workload: str, number: int) -> RoundRun | None:
        """None: not run yet."""
        return self._read(self._runs / f"{workload}.{number}.{arm}.json", RoundRun)

    def quality(self, arm: str, settings: dict[str, Any]) -> QualityRun | None:
        """None: not run yet with these settings."""
        return self._read(self._quality_path(arm, settings), QualityRun)

    def add_round(self, run: RoundRun) -> None:
        _write(self._runs / f"{run.workload}.{run.round}.{run.arm}.json", msgspec.json.encode(run))

    def add_quality(self, run: QualityRun) -> None:
        _write(self._quality_path(run.arm, run.settings), msgspec.json.encode(run))

    def _quality_path(self, arm: str, settings: dict[str, Any]) -> Path:
        digest = hashlib.sha256(msgspec.json.encode(settings, order="deterministic")).hexdigest()[:8]
        return self._runs / f"quality.{arm}.{digest}.json"

    def _read(self, path: Path, kind: type[T]) -> T | None:
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise BenchError(f"{path}: {error}; delete it to run that piece again") from None


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all: a half-written file never looks like a result."""
    partial = path.with_suffix(".partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from None
