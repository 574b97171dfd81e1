"""Decode steps replayed as captured graphs: batches padded to a few sizes, over buffers that stay where they are.

What captures is a seam: CUDA on a device; in tests something that runs the same closure again. A padding row has slot
-1 and a context of 0: it writes nothing, reads nothing and is cut off.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from etserve.attention.batch import StepBatch
from etserve.attention.cuda import DeviceKV
from etserve.attention.device_step import DecodeRows, DeviceStep
from etserve.kernels.reference_attention import slot_mapping

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # rows; longer batches run without a graph
MIN_WIDTH = 8  # blocks; widths are powers of two

_cuda: Any = torch.cuda  # parts of it have no types
Run = Callable[[DeviceStep, DeviceKV], torch.Tensor]


class Capturer(Protocol):
    """Turns launches into something to replay."""

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Run once or more, and return a replay of it and the tensor that each replay writes anew."""


class CudaCapturer:
    """By CUDA graphs that share one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """See Capturer."""
        side = _cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()  # makes what is made on first use: workspaces, modules, constants
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = run()
        return graph.replay, out


class StepBuffer:
    """The arrays of `rows` decode rows with tables `width` blocks wide: one piece, so that one copy brings them all."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        size = rows * (8 + 3 * 4 + width * 4)
        self._rows, self._width = rows, width
        self._is_pinned = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=self._is_pinned)
        self._memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self._copied = _cuda.Event() if self._is_pinned else None
        slots, numbers, tables = self._parts(self._memory)
        self.step = DeviceStep(
            token_ids=numbers[0],
            positions=numbers[1],
            slots=slots,
            logit_rows=None,
            decode=DecodeRows(None, tables, numbers[2]),
            prefill=None,
        )

    def _parts(self, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slots int64 [rows]; token ids, positions and context lengths int32 [3, rows]; tables int32 [rows, width]."""
        slots, rest = memory[: 8 * self._rows], memory[8 * self._rows :].view(torch.int32)
        numbers, tables = rest[: 3 * self._rows], rest[3 * self._rows :]
        return slots.view(torch.int64), numbers.view(3, self._rows), tables.view(self._rows, self._width)

    def fill(self, batch: StepBatch) -> None:
        """Bring a batch of at most so many rows and blocks to the device, the rest as padding."""
        if self._copied is not None:
            self._copied.synchronize()  # the last copy has left the host's memory
        slots, numbers, tables = (part.numpy() for part in self._parts(self._host))
        num_rows, width = batch.block_tables.shape
        slots[:] = -1
        slots[:num_rows] = slot_mapping(batch.query_start, batch.context_lens, batch.block_tables)
        numbers[:], tables[:] = 0, 0
        for row, values in zip(numbers, (batch.token_ids, batch.positions, batch.context_lens), strict=True):
            row[:num_rows] = values
        tables[:num_rows, :width] = batch.block_tables
        self._memory.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


@dataclass(frozen=True, slots=True)
class _Graph:
    buffer: StepBuffer
    replay: Callable[[], None]
    out: torch.Tensor  # [rows, hidden], written by each replay


class DecodeGraphs:
    """Captured when a size first comes."""

    def __init__(self, capturer: Capturer, run: Run, device: torch.device) -> None:
        """`run`: the launches of one step, which look at nothing on the host but shapes."""
        self._capturer, self._run, self._device = capturer, run, device
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._cache: DeviceKV | None = None

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def takes(self, batch: StepBatch) -> bool:
        """Whether the batch is one row for each sequence, all dense, every row wanted, and not too long."""
        num_rows = len(batch.block_tables)
        is_dense = batch.selection is None and not batch.wants_block_mass
        is_decode = len(batch.token_ids) == num_rows and len(batch.logit_rows) == num_rows
        return is_dense and is_decode and 0 < num_rows <= SIZES[-1]

    def forward(self, batch: StepBatch, cache: DeviceKV) -> torch.Tensor:
        """Hidden states f32 [R, hidden] of a batch that `takes` is true of; valid until the next call."""
        if cache is not self._cache:  # a graph holds its cache's addresses
            self._graphs, self._cache = {}, cache
        size = padded_size(*batch.block_tables.shape)
        graph = self._graphs.get(size)
        if graph is None:
            graph = self._graphs[size] = self._capture(size, batch, cache)
        graph.buffer.fill(batch)
        graph.replay()
        return graph.out[: len(batch.block_tables)]

    def _capture(self, size: tuple[int, int], batch: StepBatch, cache: DeviceKV) -> _Graph:
        buffer = StepBuffer(*size, self._device)
        buffer.fill(batch)
        return _Graph(buffer, *self._capturer.capture(lambda: self._run(buffer.step, cache)))


def padded_size(num_rows: int, num_blocks: int) -> tuple[int, int]:
    """Rows and table width of the graph that runs such a batch."""
    width = MIN_WIDTH
    while width < num_blocks:
        width *= 2
    return next(size for size in SIZES if size >= num_rows), width
