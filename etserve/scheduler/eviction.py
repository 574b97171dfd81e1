"""Which blocks of running sequences give way: the law of control/eviction.py over what steps have measured."""

import itertools
import math
from collections.abc import Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from etserve.config import BLOCK_SIZE
from etserve.control.eviction import Block, EvictionConfig, MassAverage, choose_evictions, num_over_budget
from etserve.control.keyed_random import uniform
from etserve.kv.block_pool import NULL_BLOCK
from etserve.kv.manager import KVCacheManager
from etserve.plan import ModelRunnerOutput, ScheduledSequence
from etserve.sequence import Sequence

Float64 = NDArray[np.float64]


@dataclass(slots=True)
class BlockScores:
    """What is known of one sequence's blocks, by place in its table: MassAverage.observe on arrays, and surprisals."""

    weighted: Float64  # [N]
    weight: Float64  # [N]
    surprisals: Float64  # [N * BLOCK_SIZE], nats by token; NaN: never measured

    @classmethod
    def empty(cls) -> "BlockScores":
        return cls(np.zeros(0), np.zeros(0), np.zeros(0))

    def observe_masses(self, places: NDArray[np.int64], masses: NDArray[np.float32], decay: float) -> None:
        """Take in one step: the mass of each block that was kept, at its place. Non-finite ones are ignored."""
        self._grow(int(places[-1]) + 1 if len(places) else 0)
        is_known = np.isfinite(masses)
        at, fresh = places[is_known], 1.0 - decay
        self.weighted[at] = decay * self.weighted[at] + fresh * masses[is_known].astype(np.float64)
        self.weight[at] = decay * self.weight[at] + fresh

    def observe_surprisals(self, nats: Mapping[int, float]) -> None:
        """Take in -ln p of tokens, by position."""
        if nats:
            self._grow(max(nats) // BLOCK_SIZE + 1)
            self.surprisals[list(nats)] = list(nats.values())

    def average(self, place: int) -> MassAverage:
        """The law's own state of one block."""
        if place >= len(self.weight):
            return MassAverage()
        return MassAverage(float(self.weighted[place]), float(self.weight[place]))

    def mean_surprisal(self, place: int) -> float:
        """Of the block's tokens that were measured, nats; NaN where none was."""
        known = self.surprisals[place * BLOCK_SIZE : (place + 1) * BLOCK_SIZE]
        known = known[np.isfinite(known)]
        return float(known.mean()) if len(known) else math.nan

    def _grow(self, num_blocks: int) -> None:
        more = num_blocks - len(self.weight)
        if more > 0:
            more += 64  # seldom
            self.weighted = np.concatenate((self.weighted, np.zeros(more)))
            self.weight = np.concatenate((self.weight, np.zeros(more)))
            self.surprisals = np.concatenate((self.surprisals, np.full(more * BLOCK_SIZE, math.nan)))


class Evictor:
    """Keeps scores of the sequences that may be evicted from, and takes blocks from them."""

    def __init__(self, kv: KVCacheManager, is_random: bool = False) -> None:
        """`is_random`: a placebo that obeys every guard and draws its blocks."""
        self._kv = kv
        self._is_random = is_random
        self._scores: dict[int, BlockScores] = {}  # by seq_id

    def observe_step(self, item: ScheduledSequence, output: ModelRunnerOutput) -> None:
        """Take in what a step measured of a sequence that may be evicted from; nothing of others."""
        law = item.seq.control.laws.eviction
        if law is None:
            return
        scores, seq_id = self._scores.setdefault(item.seq.seq_id, BlockScores.empty()), item.seq.seq_id
        scores.observe_surprisals(output.prompt_surprisals.get(seq_id, {}))
        if seq_id in output.block_masses:
            masses = output.block_masses[seq_id]
            places = np.flatnonzero(np.array(item.block_table) != NULL_BLOCK)[: len(masses)]
            scores.observe_masses(places, masses, law.mass_decay)

    def observe_token(self, seq: Sequence, surprisal_nats: float) -> None:
        """Take in the sequence's latest token."""
        if seq.may_be_evicted:
            scores = self._scores.setdefault(seq.seq_id, BlockScores.empty())
            scores.observe_surprisals({seq.num_tokens - 1: surprisal_nats})

    def forget(self, seq: Sequence) -> None:
        """Idempotent."""
        self._scores.pop(seq.seq_id, None)

    def keep_budget(self, seq: Sequence, num_tokens: int) -> int:
        """Evict what a sequence that grows to `num_tokens` would hold beyond its own budget; return how many blocks."""
        laws = seq.control.laws
        if laws.eviction is None or laws.block_budget is None:
            return 0
        num_blocks = -(-num_tokens // BLOCK_SIZE) - seq.num_evicted_blocks
        return self._evict(seq, laws.eviction, num_over_budget(num_blocks, laws.block_budget))

    def make_room(self, seqs: List[Sequence], num_wanted: int) -> dict[int, int]:
        """Evict up to so many blocks from sequences without a budget, lowest score first over all of them.

        Returns how many, by seq_id; none where every guard holds.
        """
        found: list[tuple[float, int, int]] = []
        by_id = {seq.seq_id: seq for seq in seqs}
        for seq in seqs:
            law = seq.control.laws.eviction
            if law is not None and seq.control.laws.block_budget is None:
                blocks = self._blocks(seq, law)
                scores = {block.index: block.score for block in blocks}
                for index in choose_evictions(blocks, _num_blocks(blocks, seq), num_wanted, law):
                    found.append((scores[index], seq.seq_id, index))
        places: dict[int, list[int]] = {}
        for _, seq_id, index in sorted(found)[:num_wanted]:
            places.setdefault(seq_id, []).append(index)
        for seq_id, indices in places.items():
            self._take(by_id[seq_id], indices)
        return {seq_id: len(indices) for seq_id, indices in places.items()}

    def _evict(self, seq: Sequence, law: EvictionConfig, num_wanted: int) -> int:
        if num_wanted <= 0:
            return 0
        blocks = self._blocks(seq, law)
        indices = choose_evictions(blocks, _num_blocks(blocks, seq), num_wanted, law)
        self._take(seq, indices)
        return len(indices)

    def _take(self, seq: Sequence, indices: List[int]) -> None:
        self._kv.evict(seq, indices)
        seq.num_evicted_blocks += len(indices)
        seq.total_evicted_blocks += len(indices)

    def _blocks(self, seq: Sequence, law: EvictionConfig) -> list[Block]:
        """The full blocks that the sequence holds, as the law sees them."""
        scores = self._scores.get(seq.seq_id) or BlockScores.empty()
        num_full = seq.num_computed_tokens // BLOCK_SIZE
        protected = _protected(seq)
        blocks = []
        for held in self._kv.held_blocks(seq):
            if held.index >= num_full:
                break
            mass, surprisal = scores.average(held.index), scores.mean_surprisal(held.index)
            if self._is_random and math.isfinite(mass.value * surprisal):
                draw = uniform(seq.seed, seq.num_tokens, held.index)
                mass, surprisal = MassAverage().observe(draw, law.mass_decay), 1.0
            is_protected = held.index in protected
            blocks.append(Block(held.index, mass, surprisal, is_protected, held.num_refs, held.is_cached))
        return blocks


def _num_blocks(held: List[Block], seq: Sequence) -> int:
    return len(held) + seq.num_evicted_blocks


def _protected(seq: Sequence) -> frozenset[int]:
    spans = seq.control.laws.protected_spans
    ranges = (range(start // BLOCK_SIZE, -(-end // BLOCK_SIZE)) for start, end in spans if end > start)
    return frozenset(itertools.chain.from_iterable(ranges))
