"""Tokens a second of megatrain in one process, compared with transformers' Llama and torch's fused AdamW.

Shapes, batch, clipping and thread count are the same. Transformers runs with its own attention ("eager") and with
torch's ("sdpa"); the faster one counts. The sides take turns within one run, so that a drift affects all of them.
Run alone on the machine: python -m benchmarks throughput [--write]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.bars import at_least
from benchmarks.result import Result
from benchmarks.single_rank_trainer import BenchmarkTrainer
from megatrain.config.config import Config
from megatrain.ops.extension import HostFunction
from megatrain.ops.host_optimizer import step_kernel
from megatrain.ops.host_rms_norm import compiled_rms_norm
from megatrain.ops.host_rotary import compiled_rotation
from megatrain.ops.host_swiglu import swiglu_backward_kernel
from megatrain.ops.square_sums import compiled_square_sum

SHAPE = {"seq_len": 512, "hidden_size": 512, "num_layers": 6, "num_heads": 8, "num_kv_heads": 4, "ffn_size": 1408,
         "vocab_size": 4096}  # fmt: skip
MICRO_BATCH_SIZE = 2
LR, WEIGHT_DECAY, GRAD_CLIP = 1e-3, 0.1, 1.0
WARMUP, ROUNDS = 3, 20
RATIO_BAR = 1.0
OTHER_KERNELS: dict[str, Callable[[], HostFunction | None]] = {
    "rotation": compiled_rotation,
    "RMSNorm": compiled_rms_norm,
    "gradient of SwiGLU": swiglu_backward_kernel,
    "gradient norm": compiled_square_sum,
}
"""By operation, what returns its kernel for CPUs if the step uses it."""


def run() -> Result:
    """Measure steps of one and of two micro-batches."""
    rows = [_measure(num_microbatches) for num_microbatches in (1, 2)]
    return Result(
        name="throughput-one-process",
        title="Tokens/s in one process, compared with transformers' Llama and torch's fused AdamW",
        command="python -m benchmarks throughput --write",
        rows=rows,
        notes=[
            f"our AdamW is {_form_of(step_kernel())}, and its bits do not depend on where a shard begins; torch's do",
            "ratio: median over rounds of (their seconds / ours), for their faster attention; above 1 we are faster",
            f"median of {ROUNDS} steps each after {WARMUP} to warm up; spread is (p90 - p10) / median of our steps",
            ", ".join(f"our {name}: {_form_of(find())}" for name, find in OTHER_KERNELS.items()),
            "fp32, forward, backward, clipping and optimizer of both sides; our side also writes its black box",
        ],
        settings={**SHAPE, "micro_batch_size": MICRO_BATCH_SIZE, "threads": torch.get_num_threads()},
        bars=[
            at_least(f"{row['micro-batches']} micro-batches: their seconds / ours", row["ratio"], RATIO_BAR)
            for row in rows
        ],
    )


def _form_of(kernel: HostFunction | None) -> str:
    return "plain torch in several passes" if kernel is None else "one pass in C"


def _measure(num_microbatches: int) -> dict[str, Any]:
    size = MICRO_BATCH_SIZE * num_microbatches
    steps = {
        "ours": _our_step(size),
        "sdpa": _their_step(num_microbatches, "sdpa"),
        "eager": _their_step(num_microbatches, "eager"),
    }
    generator = torch.Generator().manual_seed(0)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARMUP + ROUNDS):
        tokens = torch.randint(0, SHAPE["vocab_size"], (SHAPE["seq_len"] + 1, size), generator=generator)
        for name, step in list(steps.items())[:: 1 if turn % 2 == 0 else -1]:
            started = time.perf_counter()
            step(tokens)
            seconds[name].append(time.perf_counter() - started)
    counted = {name: of_side[WARMUP:] for name, of_side in seconds.items()}
    ours_s = counted["ours"]
    theirs_s = min(counted["sdpa"], counted["eager"], key=statistics.median)
    num_tokens = SHAPE["seq_len"] * size
    deciles = statistics.quantiles(ours_s, n=10)
    return {
        "micro-batches": num_microbatches,
        "ours, tokens/s": num_tokens / statistics.median(ours_s),
        **{f"{name}, tokens/s": num_tokens / statistics.median(counted[name]) for name in ("sdpa", "eager")},
        "ratio": statistics.median(b / a for a, b in zip(ours_s, theirs_s, strict=True)),
        "spread": (deciles[-1] - deciles[0]) / statistics.median(ours_s),
    }


def _our_step(global_batch_size: int) -> Callable[[Tensor], object]:
    trainer = BenchmarkTrainer(
        Config.from_dict(
            {
                "model": {**SHAPE, "norm": "rmsnorm", "mlp": "swiglu", "has_bias": False, "positions": "rope",
                          "has_tied_head": False},
                "batch": {"micro_batch_size": MICRO_BATCH_SIZE, "global_batch_size": global_batch_size},
                "train": {"steps": 1, "precision": "fp32"},
                "optimizer": {"lr": LR, "weight_decay": WEIGHT_DECAY, "grad_clip": GRAD_CLIP},
            }
        ),
        torch.device("cpu"),
    )  # fmt: skip
    return lambda tokens_SB: trainer.step(tokens_SB[:-1], tokens_SB[1:])


def _their_step(num_microbatches: int, attention: str) -> Callable[[Tensor], object]:
    model = LlamaForCausalLM(
        LlamaConfig(  # type: ignore[call-arg]  # attn_implementation is taken by its base class
            vocab_size=SHAPE["vocab_size"],
            hidden_size=SHAPE["hidden_size"],
            intermediate_size=SHAPE["ffn_size"],
            num_hidden_layers=SHAPE["num_layers"],
            num_attention_heads=SHAPE["num_heads"],
            num_key_value_heads=SHAPE["num_kv_heads"],
            max_position_embeddings=SHAPE["seq_len"],
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation=attention,
        )
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY, fused=True)

    def step(tokens_SB: Tensor) -> None:
        for micro in tokens_SB.t().chunk(num_microbatches):
            # the model shifts labels itself: seq_len tokens give seq_len - 1 losses, one fewer than on our side
            loss = model(input_ids=micro[:, :-1], labels=micro[:, :-1]).loss
            (loss / num_microbatches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
