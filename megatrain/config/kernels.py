"""Section [kernels]: which implementations compute the operations, and whether a slow one is an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatrain.config.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsConfig:
    """Which implementations compute the operations, and whether a slow one is an error."""

    strict: bool = option(
        False,
        "Whether a slow path on a GPU is an error instead of a warning: attention that writes out its scores, or "
        "compiled kernels that are missing.",
    )
    attention: Literal["auto", "cudnn", "flash", "efficient", "dense"] = option(
        "auto",
        "Which of torch's attention kernels to use on a GPU. auto: the first in this list that supports the model; "
        "the log has its name, and the reasons why earlier ones do not support the model. Another value: that "
        "kernel or an error. No effect on CPUs. With model.attention_softcap, auto uses a slower path of megatrain, "
        "and all other values are errors.",
    )
    norm: Literal["megatrain", "apex"] = option(
        "megatrain",
        "What computes LayerNorm and RMSNorm. megatrain: megatrain's own kernels, or plain PyTorch. apex: NVIDIA "
        "apex, which must be installed with its CUDA extensions; GPUs only.",
    )
    cuda_graphs: bool = option(
        False,
        "Whether a GPU replays micro-batches from CUDA graphs, from the third step on: for models so small that "
        "the host cannot launch their work fast enough. The results are the same; the memory of a micro-batch "
        "stays allocated. Only for pure data parallelism (tp_size and pp_size 1, zero_stage 1). No effect on CPUs.",
    )
