"""What one sequence's share of a step costs, from plain numbers (entropic-control, section 3).

F = 2 P n + 4 n_q d n sum_l K_l + 2 d_model |V| n_logit     FLOPs
B = 2 n_kv d bytes (sum_l K_l + n layers)                   bytes of keys and values, read and written
The weights are read once per step, whatever the batch; they are not in B.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder as far as its cost goes."""

    num_layers: int
    hidden_size: int  # d_model
    num_heads: int  # n_q
    num_kv_heads: int  # n_kv
    head_dim: int  # d
    vocab_size: int  # |V|
    num_active_parameters: int  # P: matrix elements a token meets in the layers; neither embedding nor head
    kv_element_bytes: float  # of one stored key or value element
    sketch_token_bytes: float = 0.0  # of one token's key sketches in one layer

    @property
    def kv_token_bytes(self) -> float:
        """Bytes of one token's keys and values in one layer."""
        return 2.0 * self.num_kv_heads * self.head_dim * self.kv_element_bytes


def count_layer_parameters(
    *, num_layers: int, hidden_size: int, intermediate_size: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> int:
    """Count the matrix elements of dense decoder layers: q, k, v, o and a gated MLP (norms and biases left out)."""
    attention = hidden_size * head_dim * (2 * num_heads + 2 * num_kv_heads)
    return num_layers * (attention + 3 * hidden_size * intermediate_size)


def step_flops(shape: ModelShape, *, num_tokens: int, kept_tokens: float, num_logits: int) -> float:
    """Return F. `kept_tokens`: sum over layers of the tokens that a query attends to, averaged over the queries."""
    layers = 2.0 * shape.num_active_parameters * num_tokens
    attention = 4.0 * shape.num_heads * shape.head_dim * num_tokens * kept_tokens
    head = 2.0 * shape.hidden_size * shape.vocab_size * num_logits
    return layers + attention + head


def step_kv_bytes(shape: ModelShape, *, num_tokens: int, kept_tokens: float) -> float:
    """Return B. `kept_tokens`: sum over layers of the tokens read, each once however many queries there are."""
    return shape.kv_token_bytes * (kept_tokens + num_tokens * shape.num_layers)


def dense_flops(shape: ModelShape, *, start: int, num_tokens: int, num_logits: int) -> float:
    """Return F of computing tokens [start, start + num_tokens) causally with nothing skipped: exact, not a bound."""
    mean_context = start + (num_tokens + 1) / 2.0
    return step_flops(shape, num_tokens=num_tokens, kept_tokens=shape.num_layers * mean_context, num_logits=num_logits)


def dense_kv_bytes(shape: ModelShape, *, start: int, num_tokens: int) -> float:
    """Return B of computing tokens [start, start + num_tokens) with nothing skipped."""
    return step_kv_bytes(shape, num_tokens=num_tokens, kept_tokens=float(shape.num_layers * (start + num_tokens)))
