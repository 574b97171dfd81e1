"""What each kernel achieves of the bandwidth that a copy reaches, beside torch's way where there is one.

    python -m benchmarks.gpu.kernels --out DIR
With --emulator LIBRARY it runs tiny sizes on the CPU, to show that it runs: its times then mean nothing.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.gpu.tables import Row, write_table
from etserve.kernels.cuda import CudaKernels, load
from etserve.kernels.cuda_attention import decode_attention
from etserve.kernels.cuda_selection import DeviceSelection, allocate_sketches, select_blocks, write_sketches
from etserve.kernels.selection import SelectionRule

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def seconds(run: Callable[[], object], device: str, repeats: int) -> float:
    """The median of `repeats` runs, after a few more."""
    times = []
    for _ in range(repeats + min(3, repeats)):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return sorted(times[-repeats:])[repeats // 2]


def copy_bandwidth(device: str, num_bytes: int, repeats: int) -> float:
    """Bytes a second, read and written."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds(lambda: target.copy_(source), device, repeats)


def row_pass_rows(kernels: CudaKernels, rows: int, vocab: int, bandwidth: float, repeats: int) -> Iterator[Row]:
    """The row pass, and the same measurements by torch."""
    device = kernels.device_type
    logits = torch.randn(rows, vocab, device=device).bfloat16()

    def by_torch() -> torch.Tensor:
        log_p = torch.log_softmax(logits.float(), -1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        logits.topk(min(8, vocab))
        return entropy

    for name, run in (("ours", lambda: kernels.row_pass(logits, 8)), ("torch", by_torch)):
        taken = seconds(run, device, repeats)
        yield _row(f"row pass [{rows}, {vocab}] bf16", name, taken, logits.numel() * 2, bandwidth)


def decode_rows(kernels: CudaKernels, seqs: int, context: int, bandwidth: float, repeats: int) -> Iterator[Row]:
    """Dense, and with the blocks that the newest third leaves or that epsilon 0.1 selects, selection counted."""
    device, blocks = kernels.device_type, context // 16
    total = seqs * blocks + 1
    kv = torch.randn(total, 2, KV_HEADS, 16, HEAD_DIM, device=device).bfloat16()
    tables = torch.randperm(total - 1, device=device).int().view(seqs, blocks) + 1
    lengths = torch.full((seqs,), context, dtype=torch.int32, device=device)
    q = (torch.randn(seqs, HEADS, HEAD_DIM, device=device) * 2).bfloat16()
    scale = HEAD_DIM**-0.5
    sketches = allocate_sketches(kernels, total, KV_HEADS, HEAD_DIM, 2)
    write_sketches(kernels, kv, torch.arange(total, device=device) * 16 + 15, sketches)
    batch = (kernels, q, kv, tables, lengths)
    epsilon = torch.full((seqs,), 0.1, device=device)
    size, what = seqs * context * KV_HEADS * HEAD_DIM * 4, f"decode attention {seqs} x {context}"

    def selecting(rule: SelectionRule) -> Callable[[], object]:
        wanted, own = DeviceSelection(epsilon, None, rule), sketches if rule.selector == "sketch" else None

        def run() -> object:
            chosen = select_blocks(*batch, scale=scale, sketches=own, selection=wanted, seed=0)
            decode_attention(*batch, scale=scale, selected=chosen)
            return chosen.num_kept

        return run

    yield _row(what, "dense", seconds(lambda: decode_attention(*batch, scale=scale), device, repeats), size, bandwidth)
    for name, rule in (
        ("newest third", SelectionRule(selector="recency", share=1 / 3)),
        ("sketch, epsilon 0.1", SelectionRule()),
    ):
        run = selecting(rule)
        kept = float(run().float().mean()) / blocks
        yield _row(what, f"{name}, {kept:.0%} kept", seconds(run, device, repeats), int(size * kept), bandwidth)


def _row(what: str, name: str, taken: float, num_bytes: int, bandwidth: float) -> Row:
    rate = num_bytes / taken
    return {
        "kernel": what,
        "way": name,
        "us": taken * 1e6,
        "GB/s": rate / 1e9,
        "of copy": rate / bandwidth,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--emulator", type=Path)
    options = parser.parse_args()
    kernels = CudaKernels(options.emulator) if options.emulator else load()
    if kernels is None:
        raise SystemExit("etserve was built without the CUDA kernels")
    is_real = kernels.device_type == "cuda"
    repeats = 20 if is_real else 1
    bandwidth = copy_bandwidth(kernels.device_type, 1 << (30 if is_real else 20), repeats)
    rows = [{"kernel": "copy", "way": "torch", "us": 0.0, "GB/s": bandwidth / 1e9, "of copy": 1.0}]
    rows += row_pass_rows(kernels, *((256, 128_256) if is_real else (2, 1000)), bandwidth, repeats)
    rows += decode_rows(kernels, *((32, 8192) if is_real else (1, 640)), bandwidth, repeats)
    print(write_table(options.out, "kernels", rows).read_text())


if __name__ == "__main__":
    main()
