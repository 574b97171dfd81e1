"""Decode steps as graphs, with a capturer that runs the closure again: padding, buffers, and which steps take one."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from etserve.kernels.cuda import CudaKernels
from etserve.kernels.selection import BlockSelection
from etserve.models.cuda import CudaDecoder
from etserve.models.decode_graphs import SIZES, DecodeGraphs, StepBuffer, padded_size
from tests.cuda.emulated import load_emulated
from tests.cuda.test_engine_skipping import mixed_batch
from tests.engine.helpers import PROMPTS, make_engine, request, run

CPU = torch.device("cpu")


class Replayer:
    """Writes what the closure gives into the first run's tensor, as a graph does."""

    def __init__(self) -> None:
        self.num_replays = 0

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        out = run()

        def replay() -> None:
            self.num_replays += 1
            out.copy_(run())

        return replay, out


@pytest.mark.parametrize(
    ("rows", "blocks", "expected"), [(1, 1, (1, 8)), (3, 8, (4, 8)), (17, 9, (24, 16)), (256, 300, (256, 512))]
)
def test_a_batch_takes_the_smallest_size_that_holds_it(rows: int, blocks: int, expected: tuple[int, int]) -> None:
    assert padded_size(rows, blocks) == expected


def test_a_buffer_forgets_the_last_batch_and_pads_with_rows_that_do_nothing() -> None:
    buffer = StepBuffer(4, 8, CPU)
    buffer.fill(mixed_batch([40, 20, 90, 5], [1, 1, 1, 1], 6))
    small = mixed_batch([33, 16], [1, 1], 3)
    buffer.fill(small)
    assert buffer.step.decode is not None
    assert buffer.step.slots.tolist() == [3 * 16 + 0, 4 * 16 + 15, -1, -1]
    assert buffer.step.token_ids.tolist() == [*small.token_ids.tolist(), 0, 0]
    assert buffer.step.positions.tolist() == [32, 15, 0, 0]
    assert buffer.step.decode.context_lens.tolist() == [33, 16, 0, 0]
    assert buffer.step.decode.block_tables.tolist()[1] == [4, 5, 6, 0, 0, 0, 0, 0]
    assert not buffer.step.decode.block_tables[2:].any()


def test_only_dense_decode_steps_of_a_bounded_size_take_a_graph() -> None:
    graphs = DecodeGraphs(Replayer(), lambda step, cache: torch.zeros(1), CPU)
    batch = mixed_batch([40, 20], [1, 1], 3)
    assert graphs.takes(batch)
    selection = BlockSelection(np.full(2, 0.1, np.float32))
    too_many = mixed_batch([1] * (SIZES[-1] + 1), [1] * (SIZES[-1] + 1), 1)
    for other in (
        mixed_batch([40, 20], [1, 2], 3),
        replace(batch, logit_rows=batch.logit_rows[:1]),
        replace(batch, selection=selection),
        replace(batch, wants_block_mass=True),
        too_many,
    ):
        assert not graphs.takes(other)


def test_the_engine_draws_the_same_tokens_with_graphs_and_captures_each_size_once(emulator: CudaKernels) -> None:
    wanted = [request(f"{i}", prompt, max_tokens=4 + 2 * i) for i, prompt in enumerate(PROMPTS)]
    expected = run(make_engine(), wanted)
    replayer = Replayer()
    loaded = load_emulated(emulator, capturer=replayer)
    decoder = loaded.decoder
    assert isinstance(decoder, CudaDecoder)
    assert decoder.graphs is not None
    found = run(make_engine(loaded), wanted)
    assert {key: output.token_ids for key, output in found.items()} == {
        key: output.token_ids for key, output in expected.items()
    }
    num_captured = decoder.graphs.num_captured
    assert 3 <= num_captured < replayer.num_replays
    run(make_engine(loaded), wanted[:1])  # another cache: its addresses are captured anew
    assert decoder.graphs.num_captured < num_captured
