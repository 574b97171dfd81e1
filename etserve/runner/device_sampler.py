"""Draws where the logits lie: rows that ask for nothing special never come to the host, only their tokens do.

Rows with penalties, masks or a temperature steered by entropy are copied and go the host's way (runner/sampler.py).
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray

from etserve.control.keyed_random import uniform
from etserve.kernels.cuda import CudaKernels, DeviceRowStats
from etserve.outputs import TokenLogprobs
from etserve.plan import Sampled
from etserve.runner.estimating import EXACT, EntropyReader
from etserve.runner.grammar import GrammarCompiler
from etserve.runner.sampler import DrawnRows, Sampler
from etserve.runner.steering import MIN_TEMPERATURE
from etserve.sequence import Sequence


class DeviceSampler(Sampler):
    """As Sampler; the logits that `draw` takes lie on the kernels' device."""

    def __init__(
        self,
        eos_token_ids: tuple[int, ...],
        grammars: GrammarCompiler | None,
        kernels: CudaKernels,
        reader: EntropyReader = EXACT,
    ) -> None:
        super().__init__(eos_token_ids, grammars, reader)
        self._kernels = kernels

    def draw(self, seqs: list[Sequence], logits: torch.Tensor) -> DrawnRows:
        """Draw one token per row of `logits`, f32 [len(seqs), vocab]. One wait for the device, or two."""
        plain = [index for index, seq in enumerate(seqs) if self._is_plain(seq)]
        others = sorted(set(range(len(seqs))) - set(plain))
        drawn = DrawnRows()
        if plain:
            some = logits if not others else logits[plain]
            _draw_plain(self._kernels, self._reader, [seqs[index] for index in plain], some, drawn)
        if others:
            rest = super().draw([seqs[index] for index in others], logits[others].cpu())
            drawn.sampled.update(rest.sampled)
            drawn.failed.update(rest.failed)
            drawn.num_nonfinite_rows += rest.num_nonfinite_rows
        return drawn

    def _is_plain(self, seq: Sequence) -> bool:
        return not seq.control.is_measured and not self._wishes[seq.seq_id].are_wanted(seq)


def _draw_plain(
    kernels: CudaKernels, reader: EntropyReader, seqs: list[Sequence], logits: torch.Tensor, drawn: DrawnRows
) -> None:
    num_top = max((seq.params.logprobs or 0 for seq in seqs), default=0)
    stats = kernels.row_pass(logits, reader.num_top(num_top))
    token_ids = stats.argmax
    if not all(seq.params.is_greedy for seq in seqs):
        token_ids = _sampled_ids(kernels, seqs, logits, token_ids)
    floats, ints = _to_host(logits, token_ids, stats)
    entropies = reader.entropies(floats[:, 1], floats[:, 0], floats[:, 4:], logits.shape[1]).tolist()
    for index, seq in enumerate(seqs):
        (log_sum_exp, _, varentropy, chosen), top_values = floats[index, :4].tolist(), floats[index, 4:]
        entropy = entropies[index]
        token_id, nonfinite = ints[index, :2].tolist()
        if nonfinite or not math.isfinite(entropy) or token_id < 0:
            drawn.failed[seq.seq_id] = "model_numerics"
            drawn.num_nonfinite_rows += bool(nonfinite or not math.isfinite(entropy))
            continue
        drawn.sampled[seq.seq_id] = Sampled(
            token_id=token_id,
            entropy_nats=entropy,
            varentropy=varentropy,
            temperature=seq.temperature,
            surprisal_nats=log_sum_exp - chosen,
            logprobs=_logprobs(seq, token_id, chosen, log_sum_exp, top_values, ints[index, 2:]),
        )


def _sampled_ids(
    kernels: CudaKernels, seqs: list[Sequence], logits: torch.Tensor, greedy: torch.Tensor
) -> torch.Tensor:
    """Of all rows; the greedy ones keep their likeliest token."""
    vocab, params = logits.shape[1], [seq.params for seq in seqs]
    draws = [uniform(seq.seed, seq.num_output_tokens, seq.choice) for seq in seqs]
    # One copy to the device for all columns: doubles hold each of them exactly.
    columns = np.array(
        [
            [1.0 if seq.params.is_greedy else max(seq.temperature, MIN_TEMPERATURE) for seq in seqs],
            [p.top_k if p.top_k < vocab else 0 for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
            draws,
            [float(p.is_greedy) for p in params],
        ],
        np.float64,
    )
    temperature, top_k, top_p, min_p, drawn, is_greedy = torch.from_numpy(columns).to(logits.device)
    token_ids, _ = kernels.sample(logits, temperature.float(), top_k.int(), top_p.float(), min_p.float(), drawn)
    return torch.where(is_greedy > 0, greedy, token_ids)


def _to_host(
    logits: torch.Tensor, token_ids: torch.Tensor, stats: DeviceRowStats
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """One copy of all that is wanted, the step's only wait for the device.

    Floats [R, 4 + k]: log-sum-exp, entropy, varentropy, the chosen token's logit, the top values. Ints [R, 2 + k]: the
    token, the count of entries that are not finite, the top ids.
    """
    chosen = logits.gather(1, token_ids.clamp_min(0).long()[:, None])
    columns = torch.stack((stats.log_sum_exp, stats.entropy, stats.varentropy), dim=1)
    counts = torch.stack((token_ids, stats.nonfinite), dim=1)
    floats = torch.cat((columns, chosen.float(), stats.top_values), dim=1)
    ints = torch.cat((counts, stats.top_ids), dim=1)
    packed = torch.cat((floats.view(torch.int32), ints), dim=1).cpu().numpy()
    width = floats.shape[1]
    return np.ascontiguousarray(packed[:, :width]).view(np.float32), packed[:, width:]


def _logprobs(
    seq: Sequence,
    token_id: int,
    chosen: float,
    log_sum_exp: float,
    top_values: NDArray[np.float32],
    top_ids: NDArray[np.int32],
) -> TokenLogprobs | None:
    if seq.params.logprobs is None:
        return None
    wanted = seq.params.logprobs
    pairs = [(i, v) for i, v in zip(top_ids[:wanted].tolist(), top_values[:wanted].tolist(), strict=True) if i >= 0]
    return TokenLogprobs(
        token_id=token_id,
        logprob=chosen - log_sum_exp,
        top_ids=[i for i, _ in pairs],
        top_logprobs=[v - log_sum_exp for _, v in pairs],
    )
