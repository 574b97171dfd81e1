"""One step's arrays on the device, cut into sequences with one token and sequences with several."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from etserve.attention.batch import StepBatch
from etserve.attention.prefill import PrefillRows
from etserve.config import BLOCK_SIZE
from etserve.kernels.attention import check_batch
from etserve.kernels.cuda_selection import DeviceSelection
from etserve.kernels.reference_attention import slot_mapping


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The B sequences of a step that bring one token each."""

    rows: torch.Tensor | None  # int64 [B], among the step's tokens; None: they are all of them, in order
    block_tables: torch.Tensor  # int32 [B, max_blocks]
    context_lens: torch.Tensor  # int32 [B]; 0: a padding row
    selection: DeviceSelection | None = None  # None: everything is read


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """T tokens. Padding tokens have slot -1: nothing of them is written."""

    token_ids: torch.Tensor  # int32 [T]
    positions: torch.Tensor  # int32 [T]
    slots: torch.Tensor  # int64 [T], block * 16 + offset
    logit_rows: torch.Tensor | None  # int64 [R]; None: all tokens, in order
    decode: DecodeRows | None
    prefill: PrefillRows | None
    last_rows: DecodeRows | None = None  # of the sequences of `prefill`, where masses are wanted
    wants_block_mass: bool = False


def check_step(batch: StepBatch, num_blocks: int, max_position: int, vocab_size: int) -> None:
    """Raise ValueError if the batch points out of range: on the device nobody would look."""
    if batch.selection is not None:
        batch.selection.check(*batch.block_tables.shape)
    check_batch(batch.query_start, batch.context_lens, batch.block_tables, len(batch.token_ids), num_blocks)
    if len(batch.positions) != len(batch.token_ids):
        raise ValueError(f"{len(batch.positions)} positions of {len(batch.token_ids)} tokens")
    for name, values, end in (
        ("token_ids", batch.token_ids, vocab_size),
        ("positions", batch.positions, max_position),
        ("logit_rows", batch.logit_rows, len(batch.token_ids)),
    ):
        if len(values) and not (values.min() >= 0 and values.max() < end):
            raise ValueError(f"{name} must be in [0, {end})")


def upload(batch: StepBatch, device: torch.device) -> DeviceStep:
    """Copy what one step needs to the device."""
    counts = np.diff(batch.query_start)
    single, several = np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)

    def put(values: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    def rows_of(sequences: NDArray[np.int64], *, are_all: bool, selection: DeviceSelection | None) -> DecodeRows:
        rows = None if are_all else put(batch.query_start[sequences + 1].astype(np.int64) - 1)
        return DecodeRows(rows, put(batch.block_tables[sequences]), put(batch.context_lens[sequences]), selection)

    selection = _selection(batch, single, device)
    decode = rows_of(single, are_all=not len(several), selection=selection) if len(single) else None
    wants_last = len(several) and batch.wants_block_mass
    is_all = len(batch.logit_rows) == len(batch.token_ids)
    return DeviceStep(
        token_ids=put(batch.token_ids),
        positions=put(batch.positions),
        slots=put(slot_mapping(batch.query_start, batch.context_lens, batch.block_tables)),
        logit_rows=None if is_all else put(batch.logit_rows.astype(np.int64)),
        decode=decode,
        prefill=_prefill_rows(batch, several, device) if len(several) else None,
        last_rows=rows_of(several, are_all=False, selection=None) if wants_last else None,
        wants_block_mass=batch.wants_block_mass,
    )


def _selection(batch: StepBatch, single: NDArray[np.int64], device: torch.device) -> DeviceSelection | None:
    """Of the sequences with one token: the others are read densely."""
    selection = batch.selection
    if selection is None or not (selection.epsilon[single] > 0.0).any():
        return None
    protected = None if selection.protected is None else torch.from_numpy(selection.protected[single]).to(device)
    return DeviceSelection(torch.from_numpy(selection.epsilon[single]).to(device), protected, selection.rule)


def _prefill_rows(batch: StepBatch, several: NDArray[np.int64], device: torch.device) -> PrefillRows:
    counts, lengths = np.diff(batch.query_start)[several], batch.context_lens[several]
    places = [np.arange(length) for length in lengths]
    blocks = [batch.block_tables[b, place // BLOCK_SIZE] for b, place in zip(several, places, strict=True)]
    offsets = np.concatenate(places) % BLOCK_SIZE
    rows = [np.arange(batch.query_start[b], batch.query_start[b + 1]) for b in several]

    def put(values: NDArray[np.generic], dtype: type[np.generic]) -> torch.Tensor:
        return torch.from_numpy(values.astype(dtype)).to(device)

    return PrefillRows(
        rows=put(np.concatenate(rows), np.int64),
        blocks=put(np.concatenate(blocks), np.int64),
        offsets=put(offsets, np.int64),
        query_start=put(np.cumsum([0, *counts]), np.int32),
        context_start=put(np.cumsum([0, *lengths]), np.int32),
        query_lens=tuple(counts.tolist()),
        context_lens=tuple(lengths.tolist()),
    )
