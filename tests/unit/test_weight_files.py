"""Reading weights leaves nothing of their files mapped, and what goes wrong meanwhile names file and tensor."""

import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType

from etserve.errors import ModelError
from etserve.models import gguf_source
from etserve.models.files import ModelFiles, resolve_model
from etserve.models.gguf_source import GgufSource
from etserve.models.loader import open_checkpoint
from etserve.models.tensors import expected_shapes
from tests.unit.gguf_helpers import write_gguf
from tests.unit.model_helpers import save_tiny

MAPS = Path("/proc/self/maps")
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
LAST = "layers.2.down.weight"  # in the file
needs_maps = pytest.mark.skipif(not MAPS.exists(), reason="only Linux says what is mapped")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny(path, "Llama", torch.bfloat16, **WIDE)
    return path


@pytest.fixture(params=["F32", "BF16", "Q8_0"])
def source(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> GgufSource:
    oracle = save_tiny(tmp_path / "hf", "Llama", **WIDE)
    spec = open_checkpoint(ModelFiles("m", folder=folder)).spec
    path = write_gguf(tmp_path / "m.gguf", spec, oracle.state_dict(), kind=GGMLQuantizationType[request.param])
    weights = open_checkpoint(resolve_model(str(path))).weights
    assert isinstance(weights, GgufSource)
    return weights


def names(folder: Path) -> list[str]:
    return list(expected_shapes(open_checkpoint(ModelFiles("m", folder=folder)).spec))


def is_mapped(path: Path) -> bool:
    return str(path.resolve()) in MAPS.read_text()


@needs_maps
def test_a_mapped_file_is_seen(folder: Path) -> None:
    path = folder / "model.safetensors"
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert is_mapped(path)
    assert not is_mapped(path)


@needs_maps
def test_nothing_of_a_safetensors_file_is_mapped_while_its_tensors_are_held(folder: Path) -> None:
    weights = open_checkpoint(ModelFiles("m", folder=folder)).weights
    held = [weights.tensor(name, torch.bfloat16) for name in names(folder)]
    assert not is_mapped(folder / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in held)


@needs_maps
def test_nothing_of_a_gguf_file_is_mapped_while_its_tensors_are_held(
    source: GgufSource, folder: Path, tmp_path: Path
) -> None:
    held = [source.tensor(name, torch.float32) for name in names(folder)]
    held += [source.blocks(name) for name in names(folder) if source.block_format(name) is not None]
    assert not is_mapped(tmp_path / "m.gguf")
    assert all(tensor.isfinite().all() for tensor in held)


def test_a_tensor_is_the_same_however_it_is_cut_for_reading(
    source: GgufSource, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def everything() -> dict[str, torch.Tensor]:
        found = {name: source.tensor(name, torch.float32) for name in names(folder)}
        return found | {f"{n} blocks": source.blocks(n) for n in names(folder) if source.block_format(n) is not None}

    whole = everything()
    read = os.preadv

    def a_little(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return read(descriptor, [buffers[0][:999]], offset)

    monkeypatch.setattr(gguf_source, "SLICE_ELEMENTS", 7 * 64)  # the last slice of 131 rows is a short one
    monkeypatch.setattr(gguf_source.os, "preadv", a_little)
    in_pieces = everything()
    assert in_pieces.keys() == whole.keys()
    assert all(torch.equal(in_pieces[name], tensor) for name, tensor in whole.items())


def test_a_gguf_file_that_shrinks_after_the_checks_is_named_with_the_tensor(source: GgufSource, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    os.truncate(path, path.stat().st_size // 2)
    calls: list[Any] = [lambda: source.tensor(LAST, torch.float32)]
    if source.block_format(LAST) is not None:
        calls.append(lambda: source.blocks(LAST))
    for call in calls:
        with pytest.raises(ModelError, match=r"m\.gguf: tensor blk\.2\.ffn_down\.weight: the file has become shorter"):
            call()


def test_a_gguf_file_that_is_gone_is_an_error_of_the_model(source: GgufSource, tmp_path: Path) -> None:
    header = source._header
    (tmp_path / "m.gguf").unlink()
    with pytest.raises(ModelError, match=r"m\.gguf: No such file"):
        GgufSource(header, source._spec)
