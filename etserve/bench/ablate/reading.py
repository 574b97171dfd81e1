"""Read produced texts again, densely and at temperature 1, by a bare decoder: nothing of an arm is in force here."""

import time
from collections.abc import Callable

import numpy as np
import torch

from etserve.attention.batch import StepBatch
from etserve.bench.ablate.records import Replay, RequestRun
from etserve.bench.ablate.workloads import Arrival
from etserve.config import BLOCK_SIZE
from etserve.control.clock import EntropyClock
from etserve.engine.building import Memory
from etserve.kernels import rows
from etserve.models.types import Decoder
from etserve.sampling_params import SamplingParams
from etserve.sequence import Sequence

_CHUNK_TOKENS = 512  # of one pass
_LOGIT_ROWS = 64  # at a time


class Reader:
    """Entropies of given tokens. Prompts that were read once stay in the memory as long as it has room."""

    def __init__(self, decoder: Decoder, memory: Memory, now: Callable[[], float] = time.monotonic) -> None:
        self._decoder, self._memory, self._now = decoder, memory, now
        self._num_read = 0

    def prime(self, arrivals: list[Arrival]) -> float:
        """Read the prompts, so that whoever shares the memory finds them; return the seconds that it took."""
        begin = self._now()
        for arrival in arrivals:
            self._read(arrival.prompt_token_ids, [])
        return self._now() - begin

    def replay(self, arrivals: list[Arrival], runs: list[RequestRun]) -> dict[int, Replay]:
        """By request index; requests without tokens are left out."""
        prompts = {arrival.index: arrival.prompt_token_ids for arrival in arrivals}
        return {run.index: _replay(self._read(prompts[run.index], run.token_ids)) for run in runs if run.token_ids}

    @torch.inference_mode()
    def _read(self, prompt: list[int], output: list[int]) -> list[float]:
        """H in nats of the distribution that each output token was drawn from."""
        known = [*prompt, *output[:-1]]  # the last token's own logits are nobody's
        seq = self._admit(known, len(prompt))
        first_wanted = len(prompt) - 1
        found: list[float] = []
        try:
            for start in range(seq.num_computed_tokens, len(known), _CHUNK_TOKENS):
                end = min(start + _CHUNK_TOKENS, len(known))
                wanted = range(max(start, first_wanted), end) if output else range(0)
                hidden = self._decoder.forward(self._batch(seq, start, end, wanted), self._memory.cache)
                found += self._entropies(hidden)
            seq.num_computed_tokens = len(prompt)  # output is nobody's prefix
            self._memory.manager.commit(seq)
        finally:
            self._memory.manager.free(seq)
        return found

    def _admit(self, known: list[int], num_prompt_tokens: int) -> Sequence:
        self._num_read += 1
        seq = Sequence(
            seq_id=-self._num_read,  # no engine's
            request_id="replay",
            choice=0,
            params=SamplingParams(),
            seed=0,
            token_ids=known[:num_prompt_tokens],  # the prompt's last token is computed again: its logits are wanted
            num_prompt_tokens=num_prompt_tokens,
            max_output_tokens=0,
            arrival_seconds=0.0,
        )
        cached = self._memory.manager.admit(seq)
        seq.token_ids = known
        if cached is None or not self._memory.manager.reserve(seq, len(known)):
            raise RuntimeError(f"the replaying memory is too small for {len(known)} tokens")
        seq.num_computed_tokens = cached
        return seq

    def _batch(self, seq: Sequence, start: int, end: int, wanted: range) -> StepBatch:
        table = self._memory.manager.block_table(seq)[: -(-end // BLOCK_SIZE)]
        return StepBatch(
            token_ids=np.array(seq.token_ids[start:end], np.int32),
            positions=np.arange(start, end, dtype=np.int32),
            query_start=np.array([0, end - start], np.int32),
            context_lens=np.array([end], np.int32),
            block_tables=np.array([table], np.int32),
            logit_rows=np.array(wanted, np.int32) - np.int32(start),
        )

    def _entropies(self, hidden: torch.Tensor) -> list[float]:
        found: list[float] = []
        for first in range(0, len(hidden), _LOGIT_ROWS):
            logits = self._decoder.logits(hidden[first : first + _LOGIT_ROWS])
            found += rows.row_pass(logits, 0).entropy.tolist()
        return found


def _replay(entropies: list[float]) -> Replay:
    clock = EntropyClock()
    for entropy in entropies:
        clock = clock.observe(entropy)
    return Replay(tau_nats=clock.tau_nats, nats_resolved=sum(entropies), entropies=entropies)
