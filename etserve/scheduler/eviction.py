"""Which blocks of running sequences give way: the law of control/eviction.py over what steps have measured."""

import math
from collections.abc import Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from etserve.config import BLOCK_SIZE
from etserve.control.eviction import EvictionConfig, max_evictable, num_over_budget
from etserve.control.keyed_random import uniform
from etserve.kv.block_pool import NULL_BLOCK
from etserve.kv.manager import KVCacheManager
from etserve.plan import ModelRunnerOutput, ScheduledSequence
from etserve.sequence import Sequence

Bools = NDArray[np.bool_]
Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


@dataclass(slots=True)
class BlockScores:
    """What is known of one sequence's blocks, by place in its table: MassAverage.observe on arrays, and surprisals."""

    weighted: Float64  # [N]
    weight: Float64  # [N]
    surprisals: Float64  # [N * BLOCK_SIZE], nats by token; NaN: never measured

    @classmethod
    def empty(cls) -> "BlockScores":
        return cls(np.zeros(0), np.zeros(0), np.zeros(0))

    def observe_masses(self, places: Int64, masses: NDArray[np.float32], decay: float) -> None:
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

    def values(self, num_blocks: int) -> Float64:
        """Block.score of the first `num_blocks` places, [num_blocks]; NaN where mass or surprisal is unknown."""
        self._grow(num_blocks)
        nats = self.surprisals[: num_blocks * BLOCK_SIZE].reshape(num_blocks, BLOCK_SIZE)
        is_known = np.isfinite(nats)
        with np.errstate(invalid="ignore"):  # 0 / 0 is what nobody has measured
            mean: Float64 = np.where(is_known, nats, 0.0).sum(axis=1) / is_known.sum(axis=1)
            return self.weighted[:num_blocks] / self.weight[:num_blocks] * mean

    def _grow(self, num_blocks: int) -> None:
        more = num_blocks - len(self.weight)
        if more > 0:
            more += 64  # seldom
            self.weighted = np.concatenate((self.weighted, np.zeros(more)))
            self.weight = np.concatenate((self.weight, np.zeros(more)))
            self.surprisals = np.concatenate((self.surprisals, np.full(more * BLOCK_SIZE, math.nan)))


def choose_places(scores: Float64, may_go: Bools, num_wanted: int, law: EvictionConfig) -> Int64:
    """Return at most `num_wanted` places, lowest score first and the older of equals: `choose_evictions` on arrays.

    scores [N], N blocks of the sequence, evicted ones too. may_go [N]: held, its own, and protected by nobody. How many
    may go at all, `max_evictable`, is for the caller to mind.
    """
    is_free = may_go & np.isfinite(scores)
    is_free[: law.sink_blocks] = False
    is_free[max(0, len(scores) - law.recent_blocks) :] = False
    places = np.flatnonzero(is_free)
    return places[np.argsort(scores[places], kind="stable")][:num_wanted]


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
        scores.observe_surprisals(output.given_surprisals.get(seq_id, {}))
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
        places, _ = self._choose(seq, laws.eviction, num_over_budget(num_blocks, laws.block_budget))
        self._take(seq, places)
        return len(places)

    def make_room(self, seqs: List[Sequence], num_wanted: int) -> dict[int, int]:
        """Evict up to so many blocks from sequences without a budget, lowest score first over all of them.

        Returns how many, by seq_id; none where every guard holds.
        """
        found: list[tuple[float, int, int]] = []
        by_id = {seq.seq_id: seq for seq in seqs}
        for seq in seqs:
            law = seq.control.laws.eviction
            if law is not None and seq.control.laws.block_budget is None:
                places, scores = self._choose(seq, law, num_wanted)
                found += [(score, seq.seq_id, place) for score, place in zip(scores, places, strict=True)]
        chosen: dict[int, list[int]] = {}
        for _, seq_id, place in sorted(found)[:num_wanted]:
            chosen.setdefault(seq_id, []).append(place)
        for seq_id, places in chosen.items():
            self._take(by_id[seq_id], places)
        return {seq_id: len(places) for seq_id, places in chosen.items()}

    def _choose(self, seq: Sequence, law: EvictionConfig, num_wanted: int) -> tuple[list[int], list[float]]:
        """At most so many of a sequence's full blocks, lowest score first, by place; and their scores.

        A sequence that has lost what it may lose asks at every step: counts answer that, before any block is looked at.
        """
        num_full = seq.num_computed_tokens // BLOCK_SIZE
        allowed = min(num_wanted, max_evictable(num_full - seq.num_evicted_blocks, num_full, law))
        if allowed <= 0:
            return [], []
        scores = self._values(seq, num_full)
        places = choose_places(scores, self._may_go(seq, num_full), allowed, law)
        return places.tolist(), scores[places].tolist()

    def _values(self, seq: Sequence, num_blocks: int) -> Float64:
        known = self._scores.get(seq.seq_id) or BlockScores.empty()
        scores = known.values(num_blocks)
        if self._is_random:
            draws = np.array([uniform(seq.seed, seq.num_tokens, place) for place in range(num_blocks)])
            return np.where(np.isfinite(scores), draws, math.nan)
        return scores

    def _may_go(self, seq: Sequence, num_blocks: int) -> Bools:
        """By place: held, neither shared nor cached, and not protected."""
        may_go: Bools = np.array(self._kv.block_table(seq)[:num_blocks]) != NULL_BLOCK
        may_go[: self._kv.num_prefix_blocks(seq)] = False
        for start, end in seq.control.laws.protected_spans:
            if end > start:
                may_go[start // BLOCK_SIZE : -(-end // BLOCK_SIZE)] = False
        return may_go

    def _take(self, seq: Sequence, places: List[int]) -> None:
        self._kv.evict(seq, places)
        seq.num_evicted_blocks += len(places)
        seq.total_evicted_blocks += len(places)
