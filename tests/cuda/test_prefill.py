"""Both ways to run prompts against the reference, and who takes which."""

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from etserve.attention.backend import AttentionShape
from etserve.attention.batch import StepBatch
from etserve.attention.cuda import CudaAttention, DeviceKV
from etserve.attention.device_reads import DeviceReads
from etserve.attention.device_step import check_step, upload
from etserve.attention.prefill import Prefill, choose_prefill, flash_prefill, sdpa_prefill
from etserve.config import BLOCK_SIZE
from etserve.kernels.cuda import CudaKernels
from etserve.kernels.reference_attention import masked_attention


def fake_flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """flash_attn_varlen_func as its documentation has it, by the reference."""
    assert causal
    starts, contexts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert max_seqlen_q == max(np.diff(starts))
    assert max_seqlen_k == max(np.diff(contexts))
    window = window_size[0] + 1 if window_size[0] >= 0 else 0
    parts = zip(starts, starts[1:], contexts, contexts[1:], strict=False)
    return torch.cat([masked_attention(q[a:b], k[c:d], v[c:d], softmax_scale, window)[0] for a, b, c, d in parts])


@pytest.mark.parametrize("prefill", [sdpa_prefill, flash_prefill(fake_flash)], ids=["sdpa", "flash"])
@pytest.mark.parametrize("window", [0, 7, 100])
def test_mixed_rows_attend_as_the_reference(emulator: CudaKernels, prefill: Prefill, window: int) -> None:
    """Whole prompts, chunks behind a context and single rows, in no order."""
    counts, lengths = [1, 20, 5, 1, 33], [40, 20, 38, 1, 70]
    shape = AttentionShape(1, 6, 2, 32, 0.2, window)
    attention = CudaAttention(shape, torch.float32, emulator, prefill)
    random = torch.Generator().manual_seed(window)
    widths = [-(-length // BLOCK_SIZE) for length in lengths]
    tables = np.zeros((5, max(widths)), np.int32)
    order = np.random.default_rng(1).permutation(np.arange(1, sum(widths) + 1))
    for row, part in zip(tables, np.split(order, np.cumsum(widths)[:-1]), strict=True):
        row[: len(part)] = part
    kv = torch.randn(attention.allocate(sum(widths) + 1).layers[0].shape, generator=random)
    start = np.cumsum([0, *counts]).astype(np.int32)
    positions = np.concatenate([np.arange(n - c, n) for c, n in zip(counts, lengths, strict=True)]).astype(np.int32)
    batch = StepBatch(
        np.zeros(sum(counts), np.int32), positions, start, np.array(lengths, np.int32), tables, start[1:] - 1
    )
    q = torch.randn(sum(counts), 6, 32, generator=random)
    cache = DeviceKV((kv,), (), len(kv), 0)
    found = attention.attend(cache, 0, q, upload(batch, torch.device("cpu")), DeviceReads())
    for b, length in enumerate(lengths):
        keys, values = (kv[tables[b], i].transpose(1, 2).reshape(-1, 2, 32)[:length].double() for i in (0, 1))
        rows = slice(start[b], start[b + 1])
        expected, _ = masked_attention(q[rows].double(), keys, values, 0.2, window)
        torch.testing.assert_close(found[rows].double(), expected.flatten(1), rtol=1e-4, atol=1e-5)


def test_flash_attention_is_taken_where_it_imports_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> Any:
        return SimpleNamespace(flash_attn_varlen_func=fake_flash)

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", found)
    assert choose_prefill("cuda", torch.bfloat16)[0] == "flash-attn"
    assert choose_prefill("cuda", torch.float32) == ("sdpa", sdpa_prefill)
    assert choose_prefill("cpu", torch.bfloat16) == ("sdpa", sdpa_prefill)
    monkeypatch.setattr(importlib, "import_module", missing)
    assert choose_prefill("cuda", torch.bfloat16) == ("sdpa", sdpa_prefill)


@pytest.mark.parametrize("change", [("token_ids", 7), ("positions", 9), ("logit_rows", 1), ("block_tables", 4)])
def test_a_batch_that_points_out_of_range_is_refused(change: tuple[str, int]) -> None:
    arrays = {
        "token_ids": np.zeros(1, np.int32),
        "positions": np.zeros(1, np.int32),
        "query_start": np.array([0, 1], np.int32),
        "context_lens": np.ones(1, np.int32),
        "block_tables": np.ones((1, 1), np.int32),
        "logit_rows": np.zeros(1, np.int32),
    }
    check_step(StepBatch(**arrays), num_blocks=4, max_position=9, vocab_size=7)
    name, value = change
    with pytest.raises(ValueError, match=name):
        check_step(StepBatch(**{**arrays, name: np.full_like(arrays[name], value)}), 4, 9, 7)
