"""Rotary positions against transformers' Llama: the turn, and the stretched frequencies."""

from __future__ import annotations

import math
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from megatrain.ops.rotary import inverse_frequencies, rotary_table, rotate
from tests.helpers.relative_error import assert_no_worse_than_eager, assert_same
from tests.helpers.require import require

require("transformers", find_spec("transformers") is not None, "the rotary positions of Llama are compared with it")
import transformers  # noqa: E402
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb  # noqa: E402

CPU = torch.device("cpu")


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def llama_config(head_dim: int, theta: float, **scaling: float | str) -> transformers.LlamaConfig:
    rope = {"rope_type": "default", "rope_theta": theta} | scaling
    return transformers.LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, rope_parameters=rope
    )


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("head_dim", [2, 6, 64, 128])
def test_plain_frequencies(head_dim: int, theta: float) -> None:
    expected, _ = LlamaRotaryEmbedding.compute_default_rope_parameters(llama_config(head_dim, theta))

    torch.testing.assert_close(inverse_frequencies(head_dim, theta).float(), expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("factor", [1.0, 2.0, 8.0])
def test_linear_scaling(factor: float) -> None:
    config = llama_config(64, 10000.0, rope_type="linear", factor=factor)
    expected, _ = ROPE_INIT_FUNCTIONS["linear"](config, CPU)

    found = inverse_frequencies(64, 10000.0, "linear", factor)
    torch.testing.assert_close(found.float(), expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("original_seq_len", [64, 1024, 8192])
@pytest.mark.parametrize(("factor", "low", "high"), [(8.0, 1.0, 4.0), (32.0, 1.0, 4.0), (4.0, 2.0, 3.0)])
def test_llama3_scaling(head_dim: int, original_seq_len: int, factor: float, low: float, high: float) -> None:
    config = llama_config(
        head_dim,
        500000.0,
        rope_type="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original_seq_len,
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, CPU)

    found = inverse_frequencies(head_dim, 500000.0, "llama3", factor, low, high, original_seq_len)
    torch.testing.assert_close(found.float(), expected, rtol=1e-5, atol=0)
    plain = inverse_frequencies(head_dim, 500000.0)
    assert found[0] == plain[0]
    assert found[-1] == pytest.approx(plain[-1].item() / factor)


def test_frequencies_are_on_the_cpu_in_fp64_wherever_the_model_is_built() -> None:
    with torch.device("meta"):
        frequency = inverse_frequencies(16, 10000.0, "llama3", 8.0)
        cos, sin = rotary_table(10, frequency, CPU, torch.float32)

    assert frequency.device == cos.device == sin.device == CPU
    assert frequency.dtype == torch.float64


def test_table_is_exact_far_out() -> None:
    cos, sin = rotary_table(131073, inverse_frequencies(4, 500000.0), CPU, torch.float32)

    for unit, frequency in enumerate((1.0, 500000.0**-0.5)):
        assert cos[131072, 0, 0, unit].item() == pytest.approx(math.cos(131072 * frequency), abs=1e-6)
        assert sin[131072, 0, 0, unit].item() == pytest.approx(math.sin(131072 * frequency), abs=1e-6)


def turned_by_llama(x_SBND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    full = [torch.cat([table, table], -1)[:, 0, 0][None] for table in (cos, sin)]
    q, _ = apply_rotary_pos_emb(x_SBND.permute(1, 2, 0, 3), x_SBND.permute(1, 2, 0, 3), *full)
    return q.permute(2, 0, 1, 3)


@pytest.mark.parametrize("head_dim", [2, 8, 64])
def test_turn_is_llamas(head_dim: int) -> None:
    cos, sin = rotary_table(12, inverse_frequencies(head_dim, 10000.0), CPU, torch.float64)

    assert_same(
        lambda x: rotate(x, cos, sin),
        lambda x: turned_by_llama(x, cos, sin),
        [draw(12, 2, 3, head_dim)],
        draw(12, 2, 3, head_dim, seed=1),
        1e-13,
    )


def test_turn_agrees_with_llamas_own_table() -> None:
    config = llama_config(
        16, 500000.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=32,
    )  # fmt: skip
    llama_cos, llama_sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(40)[None])
    x = draw(40, 2, 3, 16, dtype=torch.float32)
    expected, _ = apply_rotary_pos_emb(x.permute(1, 2, 0, 3), x.permute(1, 2, 0, 3), llama_cos, llama_sin)

    frequency = inverse_frequencies(16, 500000.0, "llama3", 8.0, 1.0, 4.0, 32)
    found = rotate(x, *rotary_table(40, frequency, CPU, torch.float32))
    torch.testing.assert_close(found, expected.permute(2, 0, 1, 3), rtol=1e-5, atol=2e-5)


def test_gradient_is_the_slope() -> None:
    cos, sin = rotary_table(5, inverse_frequencies(6, 100.0), CPU, torch.float64)

    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), [draw(5, 2, 2, 6).requires_grad_()])


def test_half_precision_loses_no_more_than_plain_torch() -> None:
    tables = rotary_table(64, inverse_frequencies(32, 10000.0), CPU, torch.float64)

    def plain(x: Tensor) -> Tensor:
        return turned_by_llama(x, *(table.to(x.dtype) for table in tables))

    def ours(x: Tensor) -> Tensor:
        return rotate(x, *(table.float() for table in tables))

    x, grad = draw(64, 2, 4, 32, dtype=torch.bfloat16), draw(64, 2, 4, 32, dtype=torch.bfloat16, seed=1)
    assert_no_worse_than_eager(ours, plain, [x], grad)


def test_strided_heads_and_gradients() -> None:
    cos, sin = rotary_table(7, inverse_frequencies(4, 10000.0), CPU, torch.float64)
    base, grad = draw(7, 2, 3, 5, 4), draw(2, 7, 3, 4, seed=1).transpose(0, 1)

    assert_same(
        lambda x: rotate(x[..., 1, :], cos, sin),
        lambda x: turned_by_llama(x[..., 1, :], cos, sin),
        [base],
        grad,
        1e-13,
    )


def test_scores_depend_on_the_distance_only() -> None:
    cos, sin = rotary_table(50, inverse_frequencies(16, 10000.0), CPU, torch.float64)
    q, k = draw(1, 1, 1, 16).expand(50, 1, 1, 16), draw(1, 1, 1, 16, seed=1).expand(50, 1, 1, 16)
    scores = rotate(q, cos, sin)[:, 0, 0] @ rotate(k, cos, sin)[:, 0, 0].t()

    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1])
