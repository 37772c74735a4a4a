"""FLOPs per token compared with a brute-force count and with published numbers; MFU; the table of peaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.config.model import ModelConfig
from megatrain.config.model_products import products_per_pair
from megatrain.telemetry.flops import (
    ComputeCost,
    attended_pairs,
    flops_formula,
    forward_flops_per_token,
    mfu,
    peak_flops,
    training_flops_per_token,
)

LLAMA_3_8B = ModelConfig(
    vocab_size=128_256, seq_len=8192, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_size=14_336,
    norm="rmsnorm", mlp="swiglu", has_bias=False, positions="rope", has_tied_head=False,
)  # fmt: skip
MEGASCALE_175B = ModelConfig(vocab_size=64_000, seq_len=2048, hidden_size=12_288, num_layers=96, num_heads=128)


@settings(max_examples=60, derandomize=True)
@given(st.integers(1, 40), st.integers(0, 50))
def test_pairs_are_those_of_the_mask(seq_len: int, window_size: int) -> None:
    window = window_size or seq_len
    allowed = sum(1 for query in range(seq_len) for key in range(seq_len) if query - window < key <= query)
    assert attended_pairs(seq_len, window_size) == allowed


def count_by_hand(model: ModelConfig) -> int:
    """Count the multiply-adds of one sequence matrix by matrix."""
    query, kv = model.num_heads * model.resolved_head_dim, model.resolved_num_kv_heads * model.resolved_head_dim
    shapes = [(model.hidden_size, query), (model.hidden_size, kv), (model.hidden_size, kv), (query, model.hidden_size)]
    shapes += [(model.hidden_size, model.resolved_ffn_size)] * (2 if model.mlp == "swiglu" else 1)
    shapes += [(model.resolved_ffn_size, model.hidden_size)]
    products = sum(2 * model.seq_len * rows * columns for rows, columns in shapes)
    attention = 0
    for token in range(model.seq_len):
        num_keys = min(token + 1, model.window_size or model.seq_len)
        attention += model.num_heads * (2 * num_keys * model.resolved_head_dim) * 2
    head = 2 * model.seq_len * model.hidden_size * model.vocab_size
    return model.num_layers * (products + attention) + head + count_of_pictures(model)


def count_of_pictures(model: ModelConfig) -> int:
    """Count the multiply-adds of encoder and projector, patch by patch."""
    count, width = 0, model.encoder_hidden_size
    for _ in range(model.num_patches):
        count += 2 * model.patch_size * model.patch_size * 3 * width
        for _ in range(model.encoder_num_layers):
            count += 2 * (4 * width * width + 2 * width * model.encoder_ffn_size)
            count += 2 * 2 * model.num_patches * width
        count += 2 * (width * model.hidden_size + model.hidden_size * model.hidden_size)
    return count


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mlp": "swiglu"},
        {"num_kv_heads": 1},
        {"head_dim": 5},
        {"ffn_size": 7},
        {"window_size": 6},
        {"window_size": 100},
        {"has_tied_head": False, "vocab_size": 51},
        {
            "picture_size": 6,
            "patch_size": 2,
            "encoder_hidden_size": 10,
            "encoder_num_layers": 2,
            "encoder_ffn_size": 7,
            "encoder_num_heads": 5,
        },
    ],
)
def test_against_a_count_by_hand(changes: dict[str, object]) -> None:
    shape = {"vocab_size": 50, "seq_len": 16, "hidden_size": 12, "num_layers": 3, "num_heads": 4}
    model = ModelConfig(**{**shape, **changes})
    assert forward_flops_per_token(model) * model.seq_len == pytest.approx(count_by_hand(model), rel=1e-12)
    assert training_flops_per_token(model) == 3 * forward_flops_per_token(model)


def test_samples_without_pictures_compute_no_encoder() -> None:
    shape = {"vocab_size": 50, "seq_len": 16, "hidden_size": 12, "num_layers": 3, "num_heads": 4}
    encoder = {"encoder_hidden_size": 10, "encoder_num_layers": 2, "encoder_ffn_size": 7, "encoder_num_heads": 5}
    model = ModelConfig(**shape, picture_size=6, patch_size=2, **encoder)
    pictured, text = count_by_hand(model), count_by_hand(replace(model, picture_size=0))
    assert pictured > 1.05 * text
    for share in (0.0, 0.25, 1.0):
        expected = 3 * (share * pictured + (1 - share) * text) / model.seq_len
        assert training_flops_per_token(model, pictures_per_sample=share) == pytest.approx(expected, rel=1e-12)
        cost = ComputeCost(replace(model, seq_len=32), None, "")
        assert cost.flops_per_token(model.seq_len, share) == pytest.approx(expected, rel=1e-12)
    assert " + 0.25*" in flops_formula(model, 0.25)


def flops_with_all_pairs(model: ModelConfig) -> float:
    """Return the FLOPs of a token as much of the literature counts them: attention with all seq_len**2 pairs."""
    masked = model.num_layers * (model.seq_len**2 - attended_pairs(model.seq_len))
    return training_flops_per_token(model) + 6 * products_per_pair(model) * masked / model.seq_len


def test_llama_3_8b_as_published() -> None:
    # torchtitan's and Megatron's tables for sequence 8192: 57.9 GFLOP/token with full attention, 51.5 causal.
    assert round(flops_with_all_pairs(LLAMA_3_8B) / 1e9, 1) == 57.9
    assert round(training_flops_per_token(LLAMA_3_8B) / 1e9, 1) == 51.5


def test_megascale_175b_as_published() -> None:
    # MegaScale table 2: PFlop/s over tokens/s of the Megatron-LM rows, within their rounding.
    assert flops_with_all_pairs(MEGASCALE_175B) == pytest.approx(1.0766e12, rel=1e-3)
    length, width, layers, vocab = 2048, 12_288, 96, 64_000
    formula = 72 * layers * width**2 * (1 + length / (6 * width) + vocab / (12 * layers * width))
    assert flops_with_all_pairs(MEGASCALE_175B) == pytest.approx(formula, rel=1e-12)


def test_a_window_does_not_raise_mfu() -> None:
    windowed = replace(MEGASCALE_175B, window_size=512)
    assert training_flops_per_token(windowed) < training_flops_per_token(MEGASCALE_175B)


def test_padding_of_the_vocabulary_does_not_count() -> None:
    shape = {"seq_len": 16, "hidden_size": 8, "num_layers": 1, "num_heads": 2}
    one, other = ModelConfig(vocab_size=100, vocab_multiple=1, **shape), ModelConfig(vocab_size=100, **shape)
    assert training_flops_per_token(one) == training_flops_per_token(other)


def test_the_formula_is_one_line_with_the_numbers_in_it() -> None:
    text = flops_formula(LLAMA_3_8B)
    assert "\n" not in text
    for part in ("5.147e+10", "h=4096", "kv=1024", "3*h*ffn", "vocab=128256 (unpadded)", "causal", "recompute not"):
        assert part in text


def test_formula_names_a_window_that_hides_something() -> None:
    shape = {"vocab_size": 10, "seq_len": 1024, "hidden_size": 8, "num_layers": 1, "num_heads": 1}
    for window_size, span in ((0, "(causal)"), (512, "(window 512, causal)"), (1024, "(causal)"), (2000, "(causal)")):
        assert span in flops_formula(ModelConfig(**shape, window_size=window_size)), window_size


def test_peaks_by_device_name() -> None:
    expected = {
        "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA A10": 125,
        "NVIDIA H100 80GB HBM3": 989,
        "nvidia h100": 989,
        "NVIDIA H100 PCIe": 756,
        "NVIDIA H100 NVL": 835,
        "NVIDIA H200": 989,
        "NVIDIA GH200 480GB": 989,
        "NVIDIA L40S": 362,
        "NVIDIA L40": 181,
        "NVIDIA L4": 121,
        "NVIDIA B200": 2250,
        "NVIDIA GB200": 2500,
    }
    assert {name: peak_flops(name) for name in expected} == {name: 1e12 * peak for name, peak in expected.items()}
    assert peak_flops("Intel(R) Xeon(R) Processor") is None


def test_mfu_of_megascale_table_2() -> None:
    # 12,288 GPUs, 1984.0k tokens/s, 312 TFLOP/s peak: 55.2 % is printed, with an attention window that is not printed.
    assert mfu(1_984_000 / 12_288, training_flops_per_token(MEGASCALE_175B), 312e12) == pytest.approx(0.552, rel=0.01)
