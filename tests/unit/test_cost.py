"""The cost formulas against values worked out by hand."""

import pytest

from etserve.control import cost

# 2 layers, d_model 8, 4 query heads and 2 KV heads of 2, gated MLP of 10, 100 tokens of vocabulary, bf16 cache
SHAPE = cost.ModelShape(
    num_layers=2,
    hidden_size=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    vocab_size=100,
    num_active_parameters=864,
    kv_element_bytes=2.0,
)


def test_layer_parameters_are_counted_matrix_by_matrix() -> None:
    # q 8x8, k and v 8x4, o 8x8: 192; gate, up, down 8x10: 240; two layers
    count = cost.count_layer_parameters(
        num_layers=2, hidden_size=8, intermediate_size=10, num_heads=4, num_kv_heads=2, head_dim=2
    )
    assert count == 2 * (192 + 240) == SHAPE.num_active_parameters


def test_the_demo_model_has_the_parameters_its_card_says() -> None:
    layers = cost.count_layer_parameters(
        num_layers=30, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64
    )
    norms = (2 * 30 + 1) * 576
    assert layers + norms + 49_152 * 576 == 134_515_008


def test_flops_of_one_decode_token() -> None:
    # 2*864 in the layers; 4*4*2 per kept token, 10 of them in each of 2 layers; 2*8*100 in the head
    assert cost.step_flops(SHAPE, num_tokens=1, kept_tokens=20.0, num_logits=1) == 1728 + 640 + 1600


def test_without_logits_the_head_costs_nothing() -> None:
    assert cost.step_flops(SHAPE, num_tokens=3, kept_tokens=0.0, num_logits=0) == 3 * 1728


def test_bytes_are_keys_and_values_read_and_written() -> None:
    # one token in one layer: 2 (k and v) * 2 heads * 2 * 2 bytes = 16; 20 read, 1 written in each of 2 layers
    assert SHAPE.kv_token_bytes == 16.0
    assert cost.step_kv_bytes(SHAPE, num_tokens=1, kept_tokens=20.0) == 16.0 * 22


def test_a_decode_is_the_dense_formula_at_its_context() -> None:
    assert cost.dense_flops(SHAPE, start=9, num_tokens=1, num_logits=1) == 1728 + 640 + 1600
    assert cost.dense_kv_bytes(SHAPE, start=9, num_tokens=1) == 16.0 * (20 + 2)


@pytest.mark.parametrize("cuts", [[64], [1, 63], [16, 16, 32], [7, 13, 44]])
def test_flops_do_not_depend_on_how_a_prompt_is_cut(cuts: list[int]) -> None:
    start, total = 0, 0.0
    for num_tokens in cuts:
        total += cost.dense_flops(SHAPE, start=start, num_tokens=num_tokens, num_logits=0)
        start += num_tokens
    # query p attends to p + 1 tokens
    assert total == 64 * 1728 + 32 * 2 * sum(range(1, 65))


def test_skipping_blocks_saves_attention_only() -> None:
    dense = cost.step_flops(SHAPE, num_tokens=1, kept_tokens=200.0, num_logits=1)
    half = cost.step_flops(SHAPE, num_tokens=1, kept_tokens=100.0, num_logits=1)
    assert dense - half == 32 * 100.0
