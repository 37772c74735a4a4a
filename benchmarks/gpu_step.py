"""Whole training steps on one GPU, ours beside the same model in plain torch, compiled, with fused AdamW; and a model
so small that the host is too slow for it, launched by Python and replayed from CUDA graphs.

The model has the width of Llama 3 8B and as many layers as the GPU's memory holds. The peer is written the way people
write one: fp32 weights, bf16 autocast, torch's attention, torch.compile, torch's cross entropy and torch.optim.AdamW.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.lone_trainer import LoneTrainer
from megatrain.config.config import Config
from megatrain.ops.rotary import inverse_frequencies, rotary_table
from megatrain.telemetry.flops import mfu, training_flops_per_token

BYTES_A_WEIGHT = 18
"""bf16 weight, fp32 gradient, master weight and two moments: what decides how many layers fit."""
SHARE_FOR_WEIGHTS = 0.72
GIB = 1 << 30
STEPS, WARMUP = 8, 3
Step = Callable[[Tensor], float]


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Medians over the timed steps. idle is the share of a step in which no kernel ran.

    peak_gib: of tensors. held_gib: what torch took for them. growth_gib: by how much that grew in the timed steps.
    """

    seconds: float
    tokens_per_s: float
    mfu: float
    idle: float
    peak_gib: float
    held_gib: float
    growth_gib: float
    losses: tuple[float, ...]


def model_config(num_layers: int, *, seq_len: int = 8192, **changes: Any) -> dict[str, Any]:
    """Return the [model] section."""
    return {
        "vocab_size": 128256, "seq_len": seq_len, "hidden_size": 4096, "num_layers": num_layers, "num_heads": 32,
        "num_kv_heads": 8, "ffn_size": 14336, "norm": "rmsnorm", "mlp": "swiglu", "positions": "rope",
        "rope_theta": 500000.0, "has_bias": False, "has_tied_head": False,
    } | changes  # fmt: skip


def layers_that_fit(memory_bytes: int, config: dict[str, Any]) -> int:
    """Return how many layers leave enough memory for activations, by the bytes that a weight takes."""
    hidden, ffn = config["hidden_size"], config["ffn_size"]
    heads = config["num_heads"] + 2 * config["num_kv_heads"]
    a_layer = hidden * (heads * hidden // config["num_heads"] + hidden) + 3 * hidden * ffn
    ends = 2 * config["vocab_size"] * hidden
    return max(1, int((SHARE_FOR_WEIGHTS * memory_bytes / BYTES_A_WEIGHT - ends) // a_layer))


def our_config(model: dict[str, Any], **tables: dict[str, Any]) -> Config:
    """Return the configuration of our side."""
    return Config.from_dict(
        {
            "model": model,
            "batch": {"micro_batch_size": 1, "global_batch_size": 1},
            "train": {"steps": 1000, "precision": "bf16"},
            "optimizer": {"lr": 1e-4},
            "parallel": {"recompute": "selective"},
        }
        | tables
    )


def host_bound_config(base: Config, *, cuda_graphs: bool) -> Config:
    """Return `base` with little for the GPU to do at a time: micro-batches of one sample, four a step."""
    tables = base.to_dict()
    tables["batch"] |= {"micro_batch_size": 1, "global_batch_size": 4}
    tables["kernels"] |= {"cuda_graphs": cuda_graphs}
    return Config.from_dict(tables)


def our_step(config: Config, device: torch.device) -> tuple[Step, LoneTrainer]:
    """Return our step, and the trainer to close."""
    trainer = LoneTrainer(config, device)
    return lambda tokens_SB: trainer.step(tokens_SB[:-1], tokens_SB[1:]).loss, trainer


def peer_step(model: dict[str, Any], device: torch.device, *, is_compiled: bool) -> Step:
    """Return the peer's step."""
    net = PlainLlama(model).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    forward = torch.compile(net) if is_compiled else net

    def step(tokens_SB: Tensor) -> float:
        tokens_BS = tokens_SB.t().to(device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = forward(tokens_BS[:, :-1], tokens_BS[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def measure(step: Step, config: Config, tokens_SB: Tensor, peak_flops: float) -> StepFigures:
    """Run warm-up, timed steps, and two steps under the profiler for the idle time."""
    for _ in range(WARMUP):
        step(tokens_SB)
    torch.cuda.reset_peak_memory_stats()
    held_before = torch.cuda.memory_reserved() / GIB
    seconds, losses = [], []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        losses.append(step(tokens_SB))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds)
    tokens_per_s = tokens_SB[1:].numel() / median
    share = mfu(tokens_per_s, training_flops_per_token(config.model), peak_flops)
    peak_gib, held_gib = torch.cuda.max_memory_allocated() / GIB, torch.cuda.memory_reserved() / GIB
    return StepFigures(
        median,
        tokens_per_s,
        share,
        _idle_share(step, tokens_SB),
        peak_gib,
        held_gib,
        held_gib - held_before,
        tuple(losses),
    )


def release() -> None:
    """Give the memory of the last model back."""
    gc.collect()
    torch.cuda.empty_cache()


def _idle_share(step: Step, tokens_SB: Tensor) -> float:
    """Return the part of two steps, from the first kernel to the last, in which the GPU ran none."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(2):
            step(tokens_SB)
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("Memcpy")
    )
    return idle_share(spans)


def idle_share(spans: list[tuple[float, float]]) -> float:
    """Return the share of the time from the first start to the last end that no span covers. `spans` are sorted."""
    if not spans:
        return 0.0
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1.0 - busy / (reached - spans[0][0])


class PlainLlama(nn.Module):
    """The same decoder in plain torch. Shapes: B batch, S sequence, H hidden."""

    def __init__(self, model: dict[str, Any]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model["vocab_size"], model["hidden_size"])
        self.layers = nn.ModuleList(PlainLayer(model) for _ in range(model["num_layers"]))
        self.norm = nn.RMSNorm(model["hidden_size"], eps=1e-5)
        self.head = nn.Linear(model["hidden_size"], model["vocab_size"], bias=False)
        head_dim = model["hidden_size"] // model["num_heads"]
        frequency = inverse_frequencies(head_dim, model["rope_theta"])
        cos, sin = rotary_table(model["seq_len"], frequency, torch.device("cpu"), torch.float32)
        self.register_buffer("cos", cos.view(1, -1, 1, head_dim // 2), persistent=False)
        self.register_buffer("sin", sin.view(1, -1, 1, head_dim // 2), persistent=False)

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        x_BSH = self.embedding(tokens_BS)
        for layer in self.layers:
            x_BSH = layer(x_BSH, self.cos, self.sin)
        logits = self.head(self.norm(x_BSH)).float()
        return functional.cross_entropy(logits.flatten(0, 1), labels_BS.flatten())


class PlainLayer(nn.Module):
    def __init__(self, model: dict[str, Any]) -> None:
        super().__init__()
        hidden, self.heads, self.kv_heads = model["hidden_size"], model["num_heads"], model["num_kv_heads"]
        self.head_dim = hidden // self.heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden, eps=1e-5), nn.RMSNorm(hidden, eps=1e-5)
        self.qkv = nn.Linear(hidden, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * model["ffn_size"], bias=False)
        self.down = nn.Linear(model["ffn_size"], hidden, bias=False)

    def forward(self, x_BSH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = self.qkv(self.norm1(x_BSH)).unflatten(-1, (-1, self.head_dim)).split(sizes, dim=2)
        q, k = (_turned(x, cos, sin) for x in (q, k))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x_BSH = x_BSH + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm2(x_BSH)).chunk(2, -1)
        return x_BSH + self.down(functional.silu(gate) * up)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
