"""Write the demo model's weights for the peers: GGUF files in several formats, and a Hugging Face folder.

All come from the dequantised weights that etserve computes with: servers that read one file have the same numbers.
    python benchmarks/export_demo.py build/demo
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.constants import GGMLQuantizationType, LlamaFileType
from safetensors.torch import save_file
from transformers import AutoTokenizer

from etserve.models.files import resolve_model
from etserve.models.gguf_source import GgufSource, read_gguf_spec
from etserve.models.tensors import expected_shapes, hf_name
from etserve.models.types import DecoderSpec
from etserve.tokenizer.gguf_header import GgufHeader, read_gguf_header


@dataclass(frozen=True, slots=True)
class GgufFormat:
    """What the matrices become. The embedding, which is the head too, keeps 8 bits where the others have 4."""

    matrices: GGMLQuantizationType
    embedding: GGMLQuantizationType
    file_type: LlamaFileType


FORMATS = {
    "bf16": GgufFormat(GGMLQuantizationType.BF16, GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "f16": GgufFormat(GGMLQuantizationType.F16, GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "q8_0": GgufFormat(GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4_0": GgufFormat(GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q4_0),
}
FOLDER_NAME = "demo-bf16"
_SKIPPED = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def gguf_name(precision: str) -> str:
    """The file's name in a format of FORMATS."""
    return f"demo-{precision}.gguf"


def export_gguf(source: Path, target: Path, precision: str = "bf16") -> None:
    """Copy a GGUF with matrices in another format and vectors in f32; metadata, vocabulary and template stay."""
    wanted = FORMATS[precision]
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    writer.add_file_type(wanted.file_type)
    for field in reader.fields.values():
        if not field.name.startswith(_SKIPPED):
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub_type)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        matrix = wanted.embedding if tensor.name == "token_embd.weight" else wanted.matrices
        kind = GGMLQuantizationType.F32 if values.ndim == 1 else matrix
        writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_config(spec: DecoderSpec, header: GgufHeader) -> dict[str, Any]:
    """config.json of the model."""
    return {
        "architectures": [spec.architecture],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope.theta,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.tied_head,
        "bos_token_id": header.metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": header.metadata["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "bfloat16",
    }


def export_folder(source: Path, target: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer, each as transformers and vLLM read them."""
    header = read_gguf_header(source)
    spec = read_gguf_spec(header)
    weights = GgufSource(header, spec)
    names = {name: hf_name(name) for name in expected_shapes(spec)}
    target.mkdir(parents=True, exist_ok=True)
    tensors = {there: weights.tensor(ours, torch.bfloat16).clone() for ours, there in names.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.dumps(llama_config(spec, header), indent=2)
    (target / "config.json").write_text(config + "\n", encoding="utf-8")
    AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(str(target))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--only", choices=["gguf", "folder"], help="write only the GGUF files, or only the folder")
    options = parser.parse_args()
    source = resolve_model("demo").path
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.only != "folder":
        for precision in FORMATS:
            export_gguf(source, options.folder / gguf_name(precision), precision)
            print(options.folder / gguf_name(precision))
    if options.only != "gguf":
        export_folder(source, options.folder / FOLDER_NAME)
        print(options.folder / FOLDER_NAME)


if __name__ == "__main__":
    main()
