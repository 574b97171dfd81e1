"""What steps cost, learnt while the engine runs, and what the next token of a sequence costs by that. Torch-free."""

from etserve.control.cost import ModelShape, dense_flops, dense_kv_bytes
from etserve.control.cost_model import CostFit, CostModel, StepKind, StepWork
from etserve.sequence import Sequence

_STEPS_PER_FIT = 8  # solving takes tens of microseconds


class CostMeter:
    """Takes in every step; fits anew every few of them."""

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self._model = CostModel()
        self._fits: dict[StepKind, CostFit] = {"prefill": CostFit(), "decode": CostFit()}
        self._num_steps: dict[StepKind, int] = {"prefill": 0, "decode": 0}

    def observe(self, *, num_prefill_tokens: int, flops: float, bytes_read: float, seconds: float) -> None:
        """Take in one step: its work by the cost formulas, and how long it took."""
        kind: StepKind = "prefill" if num_prefill_tokens else "decode"
        self._model = self._model.observe(kind, StepWork(flops, bytes_read), seconds)
        self._num_steps[kind] += 1
        if self._num_steps[kind] % _STEPS_PER_FIT == 0:
            self._fits[kind] = self._model.fit(kind)

    def fit(self, kind: StepKind) -> CostFit:
        """The latest fit; all zeros until there are a few steps."""
        return self._fits[kind]

    def next_token(self, seq: Sequence) -> float:
        """Marginal seconds of the sequence's next token; its GFLOP by the formula while the fit explains too little.

        The unit is the same for all sequences of a step, which is all that a rank by shares of a median needs.
        """
        start = seq.num_tokens - 1
        flops = dense_flops(self._shape, start=start, num_tokens=1, num_logits=1)
        fit = self._fits["decode"]
        if fit.is_usable:
            cost = fit.marginal_seconds(flops, dense_kv_bytes(self._shape, start=start, num_tokens=1))
            if cost > 0.0:  # a load that never changes tells only the constant
                return cost
        return flops * 1e-9
