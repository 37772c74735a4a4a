"""The frequencies of rotary positions compared with those of transformers, for each way to stretch them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain.config.model import ModelConfig
from megatrain.model.frequencies import rotary_frequencies
from tests.helpers.require import lazy_module

transformers = lazy_module("transformers")
modeling_rope_utils = lazy_module("transformers.modeling_rope_utils")

CPU = torch.device("cpu")
LENGTH = 512
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": ({"rope_scaling_factor": 4.0}, {}),
    "llama3": (
        {"rope_scaling_factor": 32.0, "rope_original_seq_len": 64, "rope_low_freq_factor": 2.0,
         "rope_high_freq_factor": 3.0},
        {"low_freq_factor": 2.0, "high_freq_factor": 3.0, "original_max_position_embeddings": 64},
    ),
    "yarn": ({"rope_scaling_factor": 4.0, "rope_original_seq_len": 128}, {"original_max_position_embeddings": 128}),
    "dynamic": ({"rope_scaling_factor": 3.0, "rope_original_seq_len": LENGTH}, {}),
}  # fmt: skip


def model_of(scaling: str, head_dim: int, **keys: Any) -> ModelConfig:
    return ModelConfig(
        vocab_size=8, seq_len=LENGTH, hidden_size=4 * head_dim, num_layers=1, num_heads=4, positions="rope",
        rope_scaling=scaling, **({"rope_theta": 500000.0} | keys),
    )  # fmt: skip


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("scaling", CASES)
def test_scaled_frequencies_are_those_of_transformers(scaling: str, head_dim: int) -> None:
    ours, theirs = CASES[scaling]
    rope = {"rope_type": scaling, "rope_theta": 500000.0, "factor": ours["rope_scaling_factor"], **theirs}
    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=LENGTH,
        rope_parameters=rope,
    )  # fmt: skip
    for seq_len in (LENGTH // 2, LENGTH, 3 * LENGTH):
        expected, factor = modeling_rope_utils.ROPE_INIT_FUNCTIONS[scaling](config, CPU, seq_len=seq_len)
        found = rotary_frequencies(model_of(scaling, head_dim, **ours), seq_len, is_local=False)

        torch.testing.assert_close(found.angle.float(), expected, rtol=2e-5, atol=0)
        assert found.factor == pytest.approx(factor)
        if scaling in ("llama3", "yarn"):
            plain = rotary_frequencies(model_of("none", head_dim), seq_len, is_local=False).angle
            assert found.angle[0] == plain[0]
            assert found.angle[-1] == pytest.approx(plain[-1].item() / ours["rope_scaling_factor"])


def test_layers_with_a_window_have_their_own_base_unstretched() -> None:
    model = model_of("linear", 16, rope_scaling_factor=8.0, rope_local_theta=100.0, window_size=4)
    local = rotary_frequencies(model, LENGTH, is_local=True).angle

    assert torch.equal(local, rotary_frequencies(model_of("none", 16, rope_theta=100.0), 1, is_local=False).angle)
    assert not torch.equal(local, rotary_frequencies(model, LENGTH, is_local=False).angle)


def test_frequencies_are_fp64_on_the_cpu_on_any_device() -> None:
    with torch.device("meta"):
        for scaling, (keys, _) in CASES.items():
            angle = rotary_frequencies(model_of(scaling, 16, **keys), LENGTH, is_local=False).angle
            assert (angle.device, angle.dtype) == (CPU, torch.float64)
