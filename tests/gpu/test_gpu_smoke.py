"""One CUDA GPU trains the same model as the CPU: same code, same random numbers, losses within the tolerance."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain.optim import learning_rate
from megatrain.rng import derive_key, fill_normal_, keep_mask
from tests.helpers.require import require
from tests.helpers.single_rank import make_config, parameters_by_name, random_tokens, run_gradients, single_rank_model

STEPS = 4
GPT: dict[str, Any] = {"dropout": 0.1, "window_size": 20}
LLAMA: dict[str, Any] = {
    "norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "has_bias": False, "has_tied_head": False,
    "num_kv_heads": 2, "block": "parallel",
}  # fmt: skip
SIZES: dict[str, Any] = {"vocab_size": 500, "seq_len": 64, "hidden_size": 64, "num_heads": 4, "num_layers": 3}


@pytest.fixture(autouse=True)
def _gpu() -> None:
    require("gpu", torch.cuda.is_available(), "torch.cuda.is_available() is false on this machine")


def train(device: str, model: dict[str, Any], precision: str, **tables: dict[str, Any]) -> list[float]:
    """Return the loss of each step."""
    config = make_config(
        model=SIZES | model, train={"steps": STEPS, "precision": precision, "seed": 7}, optimizer={"lr": 3e-3}, **tables
    )
    rank_model = single_rank_model(config, device)
    losses: list[float] = []
    for step in range(STEPS):
        losses.append(run_gradients(rank_model, random_tokens(config, seed=0), first_sample=4 * step))
        norm = rank_model.optimizer.gradient_square_sum().sqrt().item()
        rank_model.optimizer.step(learning_rate(config.optimizer, step, STEPS), min(1.0, 1.0 / norm))
    return losses


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-9), ("fp32", 1e-4), ("bf16", 2e-2)])
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_losses_are_those_of_the_cpu(model: dict[str, Any], precision: str, tolerance: float) -> None:
    on_gpu, on_cpu = train("cuda", model, precision), train("cpu", model, precision)

    assert on_gpu == pytest.approx(on_cpu, rel=tolerance)
    assert on_gpu[-1] < on_gpu[0] - 0.1


@pytest.mark.parametrize(
    "tables",
    [
        {"recompute": "full"},
        {"recompute": "selective"},
        {"zero_stage": 2},
        {"offload_layers": 2},
        {"offload_layers": 3},
    ],
    ids=str,
)
def test_options_do_not_change_the_losses(tables: dict[str, Any]) -> None:
    plain = train("cuda", GPT, "fp32", parallel={})

    assert train("cuda", GPT, "fp32", parallel=tables) == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("tables", [{}, {"recompute": "full"}, {"offload_layers": 2}, {"zero_stage": 2}], ids=str)
def test_allocator_requests_no_memory_after_the_first_steps(tables: dict[str, Any]) -> None:
    config = make_config(model=SIZES | LLAMA, train={"steps": 9, "precision": "bf16"}, parallel=tables)
    rank_model = single_rank_model(config, "cuda")
    held: list[tuple[int, int]] = []
    for step in range(9):
        run_gradients(rank_model, random_tokens(config, seed=step), first_sample=4 * step)
        rank_model.optimizer.step(1e-3, 1.0)
        statistics = torch.cuda.memory_stats()
        held.append((statistics["reserved_bytes.all.current"], statistics["num_alloc_retries"]))

    assert len(set(held[2:])) == 1, held


def test_random_numbers_are_those_of_the_cpu() -> None:
    key = derive_key("dropout", 1, "0.attention")
    tokens = torch.arange(64)[:, None] + torch.tensor([0, 1 << 40])
    drawn = [
        fill_normal_(torch.empty(300, 7, device=one), key, 0.02, (600, 7), (300, 0)).cpu() for one in ("cuda", "cpu")
    ]

    assert torch.equal(keep_mask(key, 0.3, tokens.cuda(), 96).cpu(), keep_mask(key, 0.3, tokens, 96))
    torch.testing.assert_close(*drawn, rtol=1e-6, atol=1e-9)


def test_initial_weights_are_those_of_the_cpu() -> None:
    config = make_config(model=SIZES | LLAMA, train={"steps": 1, "precision": "fp32", "seed": 7})
    on_gpu, on_cpu = (parameters_by_name(single_rank_model(config, device)) for device in ("cuda", "cpu"))

    for name, values in on_cpu.items():
        assert on_gpu[name].device.type == "cuda"
        torch.testing.assert_close(on_gpu[name].cpu(), values, rtol=1e-6, atol=1e-9, msg=name)
