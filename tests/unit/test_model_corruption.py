"""Broken models: each is refused before a tensor is read, in one line that names the file and, if any, the tensor."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from etserve.errors import ModelError
from etserve.models.files import ModelFiles, resolve_model
from etserve.models.gguf_source import GgufSource
from etserve.models.loader import open_checkpoint
from etserve.models.safetensors_source import SafetensorsSource
from etserve.tokenizer import load_tokenizer
from tests.unit.gguf_helpers import write_gguf
from tests.unit.model_helpers import UNIT_MODEL, edit_json, save_tiny

Break = Callable[[Path], None]
NORM = "model.layers.1.input_layernorm.weight"
GATE = "model.layers.2.mlp.gate_proj.weight"


def start(name: str) -> None:
    """What a server does with a model before it reads weights."""
    files = resolve_model(name)
    load_tokenizer(files, check_chat_template=True)
    open_checkpoint(files)


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def cut(at: Callable[[int, int], int]) -> Break:
    """Keep the first at(header length, size) bytes."""

    def apply(folder: Path) -> None:
        data = weights(folder).read_bytes()
        weights(folder).write_bytes(data[: at(struct.unpack("<Q", data[:8])[0], len(data))])

    return apply


def with_header_length(length: int) -> Break:
    return lambda folder: weights(folder).write_bytes(struct.pack("<Q", length) + weights(folder).read_bytes()[8:])


def with_header(change: Callable[[dict[str, Any]], object]) -> Break:
    """Rewrite the JSON header; the data stay."""

    def apply(folder: Path) -> None:
        data = weights(folder).read_bytes()
        end = 8 + struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:end])
        change(header)
        put_header(folder, json.dumps(header).encode(), data[end:])

    return apply


def put_header(folder: Path, header: bytes, data: bytes) -> None:
    weights(folder).write_bytes(struct.pack("<Q", len(header)) + header + data)


def with_duplicate_key(folder: Path) -> None:
    data = weights(folder).read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    entry = json.dumps({NORM: json.loads(data[8:end])[NORM]}).encode()[1:-1]
    put_header(folder, data[8:end].rstrip()[:-1] + b"," + entry + b"}", data[end:])


def with_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Break:
    def apply(folder: Path) -> None:
        tensors = load_file(weights(folder))
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, weights(folder))

    return apply


def shift(name: str, by: int) -> Callable[[dict[str, Any]], object]:
    def apply(header: dict[str, Any]) -> None:
        header[name]["data_offsets"] = [offset + by for offset in header[name]["data_offsets"]]

    return apply


def sharded(change: Callable[[Path, dict[str, Any]], object]) -> Break:
    """Split the weights over two files, then break the index or a file."""

    def apply(folder: Path) -> None:
        tensors = load_file(weights(folder))
        weights(folder).unlink()
        index: dict[str, Any] = {"weight_map": {}, "metadata": {"total_size": 0}}
        for i, part in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
            save_file({name: tensors[name] for name in part}, folder / f"{i}.safetensors")
            index["weight_map"].update(dict.fromkeys(part, f"{i}.safetensors"))
        index["metadata"]["total_size"] = sum(t.numel() * t.element_size() for t in tensors.values())
        change(folder, index)
        if index:
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return apply


def config(**changes: Any) -> Break:
    return lambda folder: edit_json(folder / "config.json", **changes)


def replaced(name: str, content: bytes | None) -> Break:
    """Write a file, or with None put a folder in its place."""

    def apply(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir() if content is None else (folder / name).write_bytes(content)

    return apply


def looped(name: str) -> Break:
    def apply(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(name)

    return apply


def only_pickle(folder: Path) -> None:
    weights(folder).rename(folder / "pytorch_model.bin")


def without_ends(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    for name in ("config", "tokenizer_config"):
        edit_json(folder / f"{name}.json", eos_token_id=None, eos_token=None)


CORPUS: dict[str, tuple[Break, str]] = {
    "cut in the length": (cut(lambda header, size: 5), "model.safetensors: truncated"),
    "cut in the header": (cut(lambda header, size: header // 2), "model.safetensors: truncated"),
    "cut in a tensor": (cut(lambda header, size: (header + size) // 2), "model.safetensors: truncated"),
    "without the last byte": (cut(lambda header, size: size - 1), "tensor"),
    "one byte too long": (
        lambda f: weights(f).write_bytes(weights(f).read_bytes() + b"x"),
        "model.safetensors: too long",
    ),
    "header length 0": (with_header_length(0), "model.safetensors: the header is not JSON"),
    "header length beyond the file": (with_header_length(1 << 24), "model.safetensors: truncated or broken"),
    "header length 2^63": (with_header_length(1 << 63), "model.safetensors: truncated or broken"),
    "header of garbage": (lambda f: put_header(f, b"\xff{]", b""), "model.safetensors: the header is not JSON"),
    "header nested without end": (lambda f: put_header(f, b"[" * 10**6, b""), "the header is not JSON"),
    "header that is a list": (lambda f: put_header(f, b"[]", b""), "the header is not a JSON object"),
    "duplicate key": (with_duplicate_key, f"duplicate key {NORM}"),
    "overlapping offsets": (with_header(shift(NORM, -64)), "model.safetensors: tensor"),
    "offsets with a gap": (with_header(shift(NORM, 64)), "model.safetensors: tensor"),
    "negative offsets": (
        with_header(lambda h: h[NORM].update(data_offsets=[-96, 0])),
        f"tensor {NORM} has data_offsets",
    ),
    "offsets that fit no shape": (with_header(lambda h: h[NORM].update(shape=[49])), f"tensor {NORM} spans"),
    "a shape that is no list": (with_header(lambda h: h[NORM].update(shape="48")), f"tensor {NORM} has shape"),
    "an integer dtype": (with_header(lambda h: h[NORM].update(dtype="I16")), f"tensor {NORM} has dtype 'I16'"),
    "another dtype than the bytes": (with_header(lambda h: h[NORM].update(dtype="F32")), f"tensor {NORM} spans"),
    "wrong shape": (
        with_tensors(lambda t: t.update({NORM: t[NORM][:40]})),
        f"model.safetensors: tensor {NORM} has shape [40], the config asks for [48]",
    ),
    "transposed": (with_tensors(lambda t: t.update({GATE: t[GATE].T})), f"tensor {GATE} has shape [48, 80]"),
    "missing tensor": (with_tensors(lambda t: t.pop(GATE)), f"model.safetensors: tensor {GATE} is missing"),
    "extra tensor": (with_tensors(lambda t: t.update(evil=torch.zeros(1))), "tensor evil is not known"),
    "float64 tensor": (with_tensors(lambda t: t.update({NORM: t[NORM].double()})), f"tensor {NORM} has dtype 'F64'"),
    "missing shard": (sharded(lambda f, i: (f / "1.safetensors").unlink()), "1.safetensors: No such file"),
    "shard of another revision": (sharded(lambda f, i: i["metadata"].update(total_size=1)), "total_size is 1"),
    "tensor in the wrong shard": (
        sharded(lambda f, i: i["weight_map"].update({NORM: "0.safetensors", GATE: "1.safetensors"})),
        "safetensors: tensor",
    ),
    "shard outside of the folder": (
        sharded(lambda f, i: i["weight_map"].update({NORM: "../1.safetensors"})),
        f"tensor {NORM} is in '../1.safetensors'",
    ),
    "shard by its full path": (
        sharded(lambda f, i: i["weight_map"].update({NORM: str(f / "1.safetensors")})),
        f"tensor {NORM} is in",
    ),
    "shard that is a pickle": (sharded(lambda f, i: i["weight_map"].update({NORM: "1.bin"})), f"tensor {NORM} is in"),
    "index without a map": (sharded(lambda f, i: i.pop("weight_map")), "weight_map is missing"),
    "shards without an index": (sharded(lambda f, i: i.clear()), "2 .safetensors files and no"),
    "index of garbage": (replaced("model.safetensors.index.json", b"{"), "index.json: not JSON"),
    "empty weights": (replaced("model.safetensors", b""), "model.safetensors: truncated"),
    "a folder for the weights": (replaced("model.safetensors", None), "model.safetensors: Is a directory"),
    "weights that link to themselves": (looped("model.safetensors"), "model.safetensors: Too many levels"),
    "a config that links to itself": (looped("config.json"), "config.json: Too many levels"),
    "a folder for the config": (replaced("config.json", None), "config.json: not a file"),
    "an empty config": (replaced("config.json", b""), "config.json: the file is empty"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: No such file"),
    "a config of garbage": (replaced("config.json", b"{nope"), "config.json: "),
    "a config nested without end": (replaced("config.json", b"[" * 10**6), "config.json: "),
    "only pickled weights": (only_pickle, "pytorch_model.bin: pickled weights are never loaded"),
    "no weights": (lambda f: weights(f).unlink(), "no .safetensors file"),
    "width that heads do not divide": (config(hidden_size=49, head_dim=None), "config.json: hidden_size 49"),
    "negative width": (config(hidden_size=-1), "config.json: "),
    "2^40 layers": (config(num_hidden_layers=2**40), "$.num_hidden_layers"),
    "more layers than tensors": (
        config(num_hidden_layers=4),
        "tensor model.layers.3.input_layernorm.weight is missing",
    ),
    "rope theta 0": (config(rope_theta=0, rope_parameters=None), "$.rope_theta"),
    "no end token": (without_ends, "eos_token_id is missing"),
    "an end token outside of the vocabulary": (
        lambda f: edit_json(f / "generation_config.json", eos_token_id=10**6),
        "eos_token_id 1000000",
    ),
    "more tokens than embedding rows": (config(vocab_size=131), "tokenizer.json: token id 257"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json: missing"),
    "a tokenizer of garbage": (replaced("tokenizer.json", b"{}"), "tokenizer.json: "),
    "a template that does not parse": (replaced("chat_template.jinja", b"{% for %}"), "chat_template.jinja: the chat"),
    "a template that is no text": (replaced("chat_template.jinja", b"\xff\xfe"), "chat_template.jinja: not UTF-8"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound model in bf16 with the unit model's tokenizer."""
    folder = tmp_path_factory.mktemp("whole")
    save_tiny(folder, "Llama", torch.bfloat16, vocab_size=300)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(UNIT_MODEL.path / name, folder)
    start(str(folder))
    return folder


@pytest.mark.parametrize("name", CORPUS)
def test_a_broken_folder_is_refused(name: str, whole: Path, tmp_path: Path) -> None:
    damage, reason = CORPUS[name]
    folder = tmp_path / "broken"
    shutil.copytree(whole, folder)
    damage(folder)
    check_refused(folder, reason, folder)


def check_refused(path: Path, reason: str, named: Path) -> None:
    with pytest.raises(ModelError) as caught:
        start(str(path))
    message = str(caught.value)
    assert reason in message
    assert str(named) in message
    assert "\n" not in message


def test_a_sound_sharded_folder_is_not_refused(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "sharded")
    sharded(lambda folder, index: None)(tmp_path / "sharded")
    start(str(tmp_path / "sharded"))


def test_a_rotary_buffer_and_a_copy_of_a_tied_head_are_read_past(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama", tie_word_embeddings=True)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "lm_head.weight": torch.zeros(131, 48)}
    with_tensors(lambda tensors: tensors.update(extra))(tmp_path)
    assert not open_checkpoint(ModelFiles("m", folder=tmp_path)).weights.has("head.weight")


def test_an_end_token_that_only_the_tokenizer_names_is_taken(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").unlink()
    edit_json(tmp_path / "m" / "config.json", eos_token_id=None)
    assert open_checkpoint(resolve_model(str(tmp_path / "m"))).eos_token_ids == (257,)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_refused(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "broken")
    weights(tmp_path / "broken").chmod(0)
    check_refused(tmp_path / "broken", "Permission denied", tmp_path / "broken" / "model.safetensors")


def test_a_file_that_shrinks_after_the_checks_is_named_with_the_tensor(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "broken")
    files = ModelFiles("m", folder=tmp_path / "broken")
    source = SafetensorsSource(tmp_path / "broken", open_checkpoint(files).spec)
    cut(lambda header, size: size - 100)(tmp_path / "broken")
    with pytest.raises(ModelError, match=r"model\.safetensors: tensor model\.norm\.weight: "):
        source.tensor("final_norm.weight", torch.float32)


GGUF_CORPUS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "the file is empty"),
    "no GGUF": (lambda data: b"GGML" + data[4:], "not a GGUF file"),
    "version 1": (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "GGUF version 1"),
    "big-endian": (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "GGUF version"),
    "2^60 tensors": (lambda data: data[:8] + struct.pack("<Q", 1 << 60) + data[16:], "more than"),
    "2^60 keys": (lambda data: data[:16] + struct.pack("<Q", 1 << 60) + data[24:], "more than"),
    "one key too many": (lambda data: data[:16] + struct.pack("<Q", data[16] + 1) + data[24:], ": "),
    "a string of 2^63 bytes": (lambda data: data[:24] + struct.pack("<Q", 1 << 63) + data[32:], "truncated"),
    "cut in the head": (lambda data: data[:20], "not a GGUF file"),
    "cut in the metadata": (lambda data: data[:400], "truncated: byte"),
    "cut in a tensor": (lambda data: data[: len(data) * 3 // 4], "truncated: tensor blk."),
    "without the last byte": (lambda data: data[:-1], "truncated: tensor"),
    "a nested array": (
        lambda data: data.replace(
            b"tokenizer.ggml.merges" + b"\x09\0\0\0\x08", b"tokenizer.ggml.merges" + b"\x09\0\0\0\x09"
        ),
        "nested metadata arrays",
    ),
    "an array of 2^40": (
        lambda data: data.replace(
            b"tokenizer.ggml.merges" + b"\x09\0\0\0\x08\0\0\0" + struct.pack("<Q", 2),
            b"tokenizer.ggml.merges" + b"\x09\0\0\0\x08\0\0\0" + struct.pack("<Q", 1 << 40),
        ),
        "longer than",
    ),
    "an unknown metadata type": (
        lambda data: data.replace(b"tokenizer.ggml.merges\x09", b"tokenizer.ggml.merges\x77"),
        "unknown metadata type 119",
    ),
    "a duplicate tensor": (
        lambda data: data.replace(b"blk.1.attn_q", b"blk.0.attn_q"),
        "duplicate tensor blk.0.attn_q",
    ),
    "a tensor by another name": (lambda data: data.replace(b"blk.1.attn_q", b"blk.1.attn_x"), "tensor blk.1.attn_q"),
    "a duplicate key": (lambda data: data.replace(b"ggml.tokens", b"ggml.merges"), "duplicate metadata key"),
    "an unknown tensor type": (
        lambda data: data.replace(TENSOR_HEAD, TENSOR_HEAD[:-4] + struct.pack("<I", 99)),
        "tensor output_norm.weight has unknown type 99",
    ),
    "a tensor of 2^50 elements": (
        lambda data: data.replace(TENSOR_HEAD, TENSOR_HEAD[:-12] + struct.pack("<QI", 1 << 50, 0)),
        "tensor output_norm.weight has shape",
    ),
    "a tensor of 0 elements": (
        lambda data: data.replace(TENSOR_HEAD, TENSOR_HEAD[:-12] + struct.pack("<QI", 0, 0)),
        "tensor output_norm.weight has shape",
    ),
    "a tensor over another one": (
        lambda data: data.replace(TENSOR_HEAD, TENSOR_HEAD[:-12] + struct.pack("<QI", 4800, 0)),
        "overlaps another one",
    ),
    "a vocabulary without tokens": (lambda data: data.replace(b"ggml.tokens", b"ggml.nekots"), "tokenizer.ggml.tokens"),
    "an unknown way to cut text": (lambda data: data.replace(b"gpt-2", b"gpt-9"), "tokenizer.ggml.pre 'gpt-9'"),
    "an end token outside of the vocabulary": (
        lambda data: data.replace(
            b"eos_token_id\x04\0\0\0" + struct.pack("<I", 96), b"eos_token_id\x04\0\0\0" + struct.pack("<I", 1 << 20)
        ),
        "eos_token_id 1048576",
    ),
}
# name, number of dimensions, dimension, type
TENSOR_HEAD = b"output_norm.weight" + struct.pack("<IQI", 1, 48, 0)


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("gguf")
    state = save_tiny(folder / "hf", "Llama").state_dict()
    spec = open_checkpoint(ModelFiles("m", folder=folder / "hf")).spec
    path = write_gguf(folder / "m.gguf", spec, state)
    start(str(path))
    return path.read_bytes()


@pytest.mark.parametrize("name", GGUF_CORPUS)
def test_a_broken_gguf_is_refused(name: str, gguf_bytes: bytes, tmp_path: Path) -> None:
    damage, reason = GGUF_CORPUS[name]
    path = tmp_path / "broken.gguf"
    path.write_bytes(damage(gguf_bytes))
    assert path.read_bytes() != gguf_bytes
    check_refused(path, reason, path)


def test_a_broken_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    (tmp_path / "notes.txt").write_text("no model")
    (tmp_path / "folder.gguf").mkdir()
    for name, reason in (("loop.gguf", "Too many levels"), ("notes.txt", "not a model"), ("nowhere", "No such file")):
        check_refused(tmp_path / name, reason, tmp_path / name)
    check_refused(tmp_path / "folder.gguf", "config.json: No such file", tmp_path / "folder.gguf")
    with pytest.raises(ModelError, match="null byte"):
        resolve_model("a\0b")


def test_every_cut_of_a_gguf_head_is_refused(gguf_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for size in range(0, len(gguf_bytes) // 8, 97):
        path.write_bytes(gguf_bytes[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf: "):
            start(str(path))


def test_a_source_never_hands_out_what_it_does_not_have(gguf_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes)
    source = open_checkpoint(resolve_model(str(path))).weights
    assert isinstance(source, GgufSource)
    assert source.has("head.weight")
    assert not source.has("layers.0.q_norm.weight")
