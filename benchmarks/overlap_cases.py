"""The cases of the overlap benchmark: layouts and models, the times of paced compute, and their bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MODEL = {"vocab_size": 1024, "seq_len": 256, "hidden_size": 128, "num_layers": 8, "num_heads": 4, "norm": "rmsnorm",
         "mlp": "swiglu", "positions": "rope", "has_bias": False, "has_tied_head": False}  # fmt: skip
SMALL = {**MODEL, "vocab_size": 256}
WIDE = {**MODEL, "hidden_size": 1536, "num_layers": 2, "num_heads": 12}
SHORT = {**SMALL, "num_layers": 4}


@dataclass(frozen=True, slots=True)
class OverlapCase:
    """One measurement.

    wanted: bars for the overlapped fraction and for on / ideal. forward_s, product_s, layer_s: times of paced compute
    (overlap_rank.OverlapJob); 0: not paced. peers: the kinds of torch's data parallelism that are measured too.
    """

    name: str
    parallel: Mapping[str, Any]
    num_microbatches: int
    wanted: tuple[float, float]
    micro_batch_size: int = 16
    model: Mapping[str, Any] = field(default_factory=lambda: MODEL)
    forward_s: float = 0.0
    product_s: float = 0.0
    layer_s: float = 0.0
    peers: Sequence[str] = ()

    @property
    def is_traced(self) -> bool:
        """Whether the ideal is replayed from the calls (overlap_trace.py) instead of the schedule."""
        return self.parallel.get("pp_size", 1) == 1

    def tables(self, *, has_overlap: bool) -> dict[str, Any]:
        """Return the tables of the configuration of one side."""
        return {
            "model": self.model,
            "parallel": {**self.parallel, "overlap": has_overlap},
            "batch": {
                "micro_batch_size": self.micro_batch_size,
                "global_batch_size": self.num_microbatches * self.micro_batch_size * self.parallel.get("dp_size", 1),
            },
            "train": {"steps": 1, "precision": "fp32"},
            "optimizer": {"lr": 1e-4},
            "runtime": {"device": "cpu"},
        }


DEFAULT = {"num_chunks": 1, "bucket_size": 0}
DP = {"num_chunks": 4, "schedule": "interleaved", "bucket_size": 1 << 18}
TP = {"tp_size": 2, "num_sequence_chunks": 4}
PP = {"dp_size": 1, "num_chunks": 2, "schedule": "interleaved", "bucket_size": 1 << 18}
PEERS = ("DDP", "FSDP2")
CASES = [
    OverlapCase("DP, 2 ranks, 4 chunks", {"dp_size": 2, **DP}, 1, (0.8, 1.08), peers=PEERS),
    OverlapCase("DP, 2 ranks, 8 chunks", {"dp_size": 2, **DP, "num_chunks": 8}, 1, (0.8, 1.08), peers=PEERS),
    OverlapCase("DP, 4 ranks, 4 chunks, paced by layer", {"dp_size": 4, **DP}, 1, (0.8, 1.08), 2, SMALL, layer_s=0.05),
    OverlapCase("DP, 2 ranks, default chunks", {"dp_size": 2, **DEFAULT}, 1, (0.8, 1.08), peers=("DDP",)),
    OverlapCase("DP, 4 ranks, default chunks, paced by layer", {"dp_size": 4, **DEFAULT}, 1, (0.8, 1.08), 2, SMALL,
         layer_s=0.05),
    OverlapCase("PP, 2 stages, interleaved", {**PP, "pp_size": 2}, 8, (0.8, 1.10), 4),
    OverlapCase("PP, 4 stages, interleaved, paced", {**PP, "pp_size": 4}, 8, (0.8, 1.10), 2, SMALL, 0.04),
    OverlapCase("DP 2 x PP 2, paced by layer", {**PP, "dp_size": 2, "pp_size": 2}, 4, (0.75, math.inf), 2, SMALL,
         layer_s=0.03),
    OverlapCase("TP 2, 4 sequence chunks", {**TP, "dp_size": 1}, 1, (0.6, math.inf), 1, WIDE),
    OverlapCase("TP 2 x DP 2, paced", {**DP, **TP, "dp_size": 2, "bucket_size": 1 << 16}, 1, (0.75, math.inf), 4, SHORT,
         product_s=0.006),
]  # fmt: skip
