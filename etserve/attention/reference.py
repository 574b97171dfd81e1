"""Attention in plain torch on any device and dtype: the oracle of the native backend, and slow."""

from dataclasses import dataclass

import torch

from etserve.attention.backend import AttentionShape, PagedKV
from etserve.attention.batch import StepBatch
from etserve.kernels.reference_attention import BLOCK_SIZE, masked_attention, narrow, round_to_bytes, slot_mapping
from etserve.kernels.reference_selection import RowChoice, choose_for_row


@dataclass(frozen=True, slots=True)
class LayerReads:
    """What one layer's attention read, per sequence."""

    num_blocks: list[int]  # [B], sum over KV heads
    missing: list[float]  # [B], sum over KV heads
    block_mass: torch.Tensor  # f32 [B, max_blocks], largest over heads, of last rows


class ReferenceAttention:
    """A layer's cache is [2, num_blocks * 16, num_kv_heads, head_dim]: plain slots, keys then values."""

    def __init__(
        self, shape: AttentionShape, dtype: torch.dtype, device: torch.device | str = "cpu", sketch_bits: int = 0
    ) -> None:
        """`dtype`: any KV dtype; int8 entries are rounded as the native cache rounds them, and kept as float32.

        `sketch_bits`: of the sketches to select by, made anew from the cache at each call; 0: none; EXACT_BITS: true
        masses take their place.
        """
        self.shape = shape
        self._sketch_bits = sketch_bits
        self._is_rounded = dtype == torch.int8
        self._dtype = torch.float32 if self._is_rounded else dtype
        self._device = torch.device(device)

    def bytes_per_block(self) -> int:
        shape = self.shape
        return shape.num_layers * 2 * BLOCK_SIZE * shape.num_kv_heads * shape.head_dim * self._dtype.itemsize

    def allocate(self, num_blocks: int) -> PagedKV:
        size = (2, num_blocks * BLOCK_SIZE, self.shape.num_kv_heads, self.shape.head_dim)
        layers = tuple(torch.zeros(size, dtype=self._dtype, device=self._device) for _ in range(self.shape.num_layers))
        return PagedKV(layers, num_blocks, num_blocks * self.bytes_per_block())

    def write(self, cache: PagedKV, layer: int, keys: torch.Tensor, values: torch.Tensor, batch: StepBatch) -> None:
        """See AttentionBackend.write."""
        slots = torch.from_numpy(slot_mapping(batch.query_start, batch.context_lens, batch.block_tables))
        where = slots.to(self._device)
        cache.layers[layer][0, where] = self._stored(keys)
        cache.layers[layer][1, where] = self._stored(values)

    def _stored(self, entries: torch.Tensor) -> torch.Tensor:
        if not self._is_rounded:
            return narrow(entries, self._dtype)
        codes, scales = round_to_bytes(entries)
        return codes * scales

    def attend(self, cache: PagedKV, layer: int, q: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """See AttentionBackend.attend. Scores and sums are f32 at least."""
        return self.attend_and_count(cache, layer, q, batch)[0]

    def attend_and_count(
        self, cache: PagedKV, layer: int, q: torch.Tensor, batch: StepBatch
    ) -> tuple[torch.Tensor, LayerReads]:
        """As attend, with what was read. Raises ValueError if the batch's selection does not fit or cannot be made."""
        self._check(batch)
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty_like(q)
        reads = LayerReads([], [], torch.zeros(batch.block_tables.shape))
        for b, length in enumerate(batch.context_lens.tolist()):
            rows = slice(int(batch.query_start[b]), int(batch.query_start[b + 1]))
            keys, values = self._gather(cache.layers[layer], batch, b, length)
            choice = self._choose(layer, q[rows], keys, batch, b)
            skipped = None if choice is None else choice.skipped(length).to(self._device)
            attended, weights = masked_attention(
                q[rows].to(wide), keys.to(wide), values.to(wide), self.shape.scale, self.shape.window, skipped
            )
            out[rows] = attended.to(q.dtype)
            self._count(reads, b, choice, weights[-1])
        return out.flatten(1), reads

    def _check(self, batch: StepBatch) -> None:
        if batch.selection is None:
            return
        batch.selection.check(*batch.block_tables.shape)
        if self.shape.window:
            raise ValueError("nothing can be skipped in a sliding window")
        if batch.selection.rule.selector == "sketch" and not self._sketch_bits:
            raise ValueError("nothing can be skipped without sketches")

    def _choose(self, layer: int, q: torch.Tensor, keys: torch.Tensor, batch: StepBatch, b: int) -> RowChoice | None:
        """None: everything is read."""
        selection = batch.selection
        if selection is None or len(q) > 1 or layer < selection.rule.dense_layers:
            return None
        return choose_for_row(selection, b, q[0], keys, self.shape.scale, self._sketch_bits, layer)

    def _count(self, reads: LayerReads, b: int, choice: RowChoice | None, weights: torch.Tensor) -> None:
        num_blocks = -(-weights.shape[1] // BLOCK_SIZE)
        padded = torch.nn.functional.pad(weights.float(), (0, num_blocks * BLOCK_SIZE - weights.shape[1]))
        reads.block_mass[b, :num_blocks] = padded.view(len(weights), num_blocks, BLOCK_SIZE).sum(-1).amax(0).cpu()
        if choice is None:
            reads.num_blocks.append(num_blocks * self.shape.num_kv_heads)
            reads.missing.append(0.0)
        else:
            reads.num_blocks.append(sum(len(blocks) for blocks in choice.kept))
            reads.missing.append(sum(choice.missing))

    def _gather(self, layer: torch.Tensor, batch: StepBatch, b: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = torch.from_numpy(batch.block_tables[b, : -(-length // BLOCK_SIZE)]).to(self._device, torch.int64)
        slots = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=self._device)).flatten()[:length]
        return layer[0, slots], layer[1, slots]
