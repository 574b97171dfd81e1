"""Where a model's calibration lies, if somebody has measured it. Knows names and sizes; reads no weights, no torch."""

import hashlib
from pathlib import Path

from etserve.models.files import ModelFiles, weight_files

BESIDE = "etserve-calibration.toml"  # in the model's folder; a .gguf file has NAME.etserve-calibration.toml beside it
SHIPPED = Path(__file__).with_name("calibration")  # MODEL-FINGERPRINT.toml, all that was measured as JSON beside it
_HEAD_BYTES = 1 << 20  # of a .gguf file: its metadata


def fingerprint(files: ModelFiles) -> str:
    """16 hex digits of what the model is: its config (or GGUF metadata) and the sizes of its weight files.

    Raises OSError for files that cannot be read.
    """
    digest = hashlib.sha256()
    if files.gguf is not None:
        with files.gguf.open("rb") as file:
            digest.update(file.read(_HEAD_BYTES))
        weights = [files.gguf]
    else:
        digest.update((files.path / "config.json").read_bytes())
        weights = weight_files(files.path)
    digest.update(repr([path.stat().st_size for path in weights]).encode())
    return digest.hexdigest()[:16]


def own_path(files: ModelFiles, folder: Path) -> Path:
    """Where `etserve calibrate` puts what it measured, in the user's own `folder`."""
    return folder / f"{files.name}-{fingerprint(files)}.toml"


def find_calibration(files: ModelFiles, folder: Path) -> Path | None:
    """The user's own measurement, else one beside the model, else the one that is shipped for it, else None."""
    beside = files.path.with_suffix("." + BESIDE) if files.gguf is not None else files.path / BESIDE
    shipped = sorted(SHIPPED.glob(f"*-{fingerprint(files)}.toml"))  # whatever the file is called here
    return next((path for path in (own_path(files, folder), beside, *shipped) if path.is_file()), None)
