"""Whole training steps on one GPU: megatrain's, and the same model in plain torch, compiled, with fused AdamW. Also a
model so small that the host limits it, launched by Python and replayed from CUDA graphs.

The model has the width of Llama 3 8B and as many layers as fit into the GPU's memory. The peer is written in the usual
way: fp32 weights, bf16 autocast and residual stream, torch's attention, torch.compile, torch's cross entropy and
torch.optim.AdamW.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.nn import functional

from benchmarks.gpu_target import GpuTarget
from benchmarks.single_rank_trainer import BenchmarkTrainer
from megatrain.config.config import Config
from megatrain.ops.rotary import inverse_frequencies, rotary_table
from megatrain.telemetry.flops import mfu, training_flops_per_token

SHARE_OF_MEMORY = 0.87
"""The fraction of memory for tensors. The driver, the libraries and fragmentation use the rest."""
GIB = 1 << 30
STEPS, WARMUP = 8, 3
Step = Callable[[Tensor], float]


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The figures of the timed steps; times and rates are medians.

    peak_gib: of tensors. held_gib: reserved by torch for them. growth_gib: growth of held_gib in the timed steps.
    """

    seconds: float
    tokens_per_s: float
    mfu: float
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


def layers_that_fit(memory_bytes: int, model: dict[str, Any], num_microbatches: int = 1) -> int:
    """Return how many layers fit into memory on both sides, at least 1."""
    num_layers = 1
    while needed_bytes(model, num_layers + 1, num_microbatches) <= SHARE_OF_MEMORY * memory_bytes:
        num_layers += 1
    return num_layers


def needed_bytes(model: dict[str, Any], num_layers: int, num_microbatches: int = 1) -> int:
    """Return an upper estimate of the bytes of a step on either side, with micro-batches of one sample.

    With Llama 3 8B's sizes, of 8192 tokens: 218,103,808 weights a layer and 1,050,673,152 at both ends; 1.14e9 bytes
    kept for backward a layer; 1.05e9 logits. An H100 (85.0e9 bytes) gets 10 layers, which take 71.7e9; an H200 (150e9)
    gets 21, which take 127.4e9.
    """
    hidden, ffn, tokens = model["hidden_size"], model["ffn_size"], model["seq_len"]
    qkv = hidden // model["num_heads"] * (model["num_heads"] + 2 * model["num_kv_heads"])
    num_weights = num_layers * (hidden * (qkv + hidden) + 3 * hidden * ffn) + 2 * model["vocab_size"] * hidden
    # kept in bf16: two sums of the residual stream, two norms, the attention's result, q, k and v, gate, up and product
    kept = num_layers * 2 * tokens * (5 * hidden + qkv + 3 * ffn)
    num_logits = tokens * model["vocab_size"]
    # the peer at the beginning of backward: fp32 weights and moments (4 + 8 bytes), bf16 copies (2), no gradients yet;
    # logits and their gradient, each in bf16 and fp32 (12)
    at_the_loss = 14 * num_weights + kept + 12 * num_logits
    # megatrain, which keeps its gradients from the first step on: bf16 weight (2), fp32 gradient, master weight and
    # moments (16); logits in bf16, with their gradient in the same memory. The peer at the end of backward takes less:
    # 18 bytes a weight, and no kept activations
    with_gradients = 18 * num_weights + kept + 2 * num_logits
    # the peer at the loss of a later micro-batch: fp32 gradients of the earlier ones
    of_several = at_the_loss + 4 * num_weights if num_microbatches > 1 else 0
    return max(at_the_loss, with_gradients, of_several)


def our_config(model: dict[str, Any], num_microbatches: int = 1, **tables: dict[str, Any]) -> Config:
    """Return the configuration of megatrain's side. As the peer, it recomputes nothing."""
    return Config.from_dict(
        {
            "model": model,
            "batch": {"micro_batch_size": 1, "global_batch_size": num_microbatches},
            "train": {"steps": 1000, "precision": "bf16"},
            "optimizer": {"lr": 1e-4},
        }
        | tables
    )


def host_bound_config(base: Config, *, cuda_graphs: bool) -> Config:
    """Return `base` with little work for the GPU at a time: micro-batches of one sample, four a step."""
    tables = base.to_dict()
    tables["batch"] |= {"micro_batch_size": 1, "global_batch_size": 4}
    tables["kernels"] |= {"cuda_graphs": cuda_graphs}
    return Config.from_dict(tables)


def our_step(config: Config, device: torch.device) -> tuple[Step, BenchmarkTrainer]:
    """Return megatrain's step, and the trainer that the caller must close."""
    trainer = BenchmarkTrainer(config, device)
    return lambda tokens_SB: trainer.step(tokens_SB[:-1], tokens_SB[1:]).loss, trainer


def peer_step(model: dict[str, Any], device: torch.device, wrap: Callable[[Any], Callable[..., Any]]) -> Step:
    """Return the peer's step, by micro-batches of one sample. wrap: compiles the model, or returns it as it is."""
    with device:  # initializing all these weights on the CPU would take long
        net = PlainLlama(model)
    net.to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    forward = wrap(net)

    def step(tokens_SB: Tensor) -> float:
        tokens_BS = tokens_SB.t().to(device)
        loss = torch.zeros((), device=device)
        for tokens_1S in tokens_BS.split(1):
            with torch.autocast(device.type, torch.bfloat16):
                part = forward(tokens_1S[:, :-1], tokens_1S[:, 1:]) / len(tokens_BS)
            part.backward()
            loss += part.detach()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def measure(target: GpuTarget, step: Step, config: Config, tokens_SB: Tensor, peak_flops: float) -> StepFigures:
    """Run warm-up and timed steps. On a CPU the memory is not measured: 0."""
    for _ in range(WARMUP):
        step(tokens_SB)
    if target.is_gpu:
        torch.cuda.reset_peak_memory_stats()
    _, held_before = _memory_gib(target)
    seconds, losses = [], []
    for _ in range(STEPS):
        target.synchronize()
        started = time.perf_counter()
        losses.append(step(tokens_SB))
        target.synchronize()
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds)
    tokens_per_s = tokens_SB[1:].numel() / median
    share = mfu(tokens_per_s, training_flops_per_token(config.model), peak_flops)
    peak_gib, held_gib = _memory_gib(target)
    return StepFigures(
        median,
        tokens_per_s,
        share,
        peak_gib,
        held_gib,
        held_gib - held_before,
        tuple(losses),
    )


def _memory_gib(target: GpuTarget) -> tuple[float, float]:
    """Return the peak of tensors, and what torch holds for them."""
    if not target.is_gpu:
        return 0.0, 0.0
    return torch.cuda.max_memory_allocated() / GIB, torch.cuda.memory_reserved() / GIB


def profiled_idle(step: Step, tokens_SB: Tensor) -> float | str:
    """Return the fraction of two steps, from the first kernel to the last, in which no kernel ran; or why not.

    `step` has run before. The profiler may leave state behind in this process.
    """
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(2):
                step(tokens_SB)
            torch.cuda.synchronize()
        return idle_share(kernel_spans(profile.events()))
    except Exception as error:  # noqa: BLE001 - a machine may forbid profiling; the step's time is known all the same
        return f"not measured: {type(error).__name__}: {error}"


def kernel_spans(events: Iterable[Any]) -> list[tuple[float, float]]:
    """Return begin and end of each kernel of a profile, sorted. Copies and user annotations do not count as kernels."""
    return sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA
        and not event.is_user_annotation
        and not event.name.startswith(("Memcpy", "Memset"))
    )


def idle_share(spans: list[tuple[float, float]]) -> float | str:
    """Return the fraction of the time from the first start to the last end that no span covers. `spans` are sorted."""
    if not spans:
        return "not measured: the profiler saw no kernel"
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
        self.norm = PlainNorm(model["hidden_size"])
        self.head = nn.Linear(model["hidden_size"], model["vocab_size"], bias=False)
        head_dim = model["hidden_size"] // model["num_heads"]
        frequency = inverse_frequencies(head_dim, model["rope_theta"])
        cos, sin = rotary_table(model["seq_len"], frequency, torch.device("cpu"), torch.float32)
        self.register_buffer("cos", cos.view(1, -1, 1, head_dim // 2), persistent=False)
        self.register_buffer("sin", sin.view(1, -1, 1, head_dim // 2), persistent=False)

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        x_BSH = self.embedding(tokens_BS).bfloat16()
        for layer in self.layers:
            x_BSH = layer(x_BSH, self.cos, self.sin)
        logits = self.head(self.norm(x_BSH)).float()
        return functional.cross_entropy(logits.flatten(0, 1), labels_BS.flatten())


class PlainNorm(nn.Module):
    """RMSNorm in fp32 with a result in bf16, like the residual stream. With only autocast it would stay in fp32."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x_BSH: Tensor) -> Tensor:
        wide_BSH = x_BSH.float()
        rstd_BS1 = (wide_BSH.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        return (wide_BSH * rstd_BS1 * self.weight).to(x_BSH.dtype)


class PlainLayer(nn.Module):
    def __init__(self, model: dict[str, Any]) -> None:
        super().__init__()
        hidden, self.heads, self.kv_heads = model["hidden_size"], model["num_heads"], model["num_kv_heads"]
        self.head_dim = hidden // self.heads
        self.norm1, self.norm2 = PlainNorm(hidden), PlainNorm(hidden)
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
