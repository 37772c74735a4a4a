"""Types by name, and the one in which sums, statistics and everything that adds up over steps are kept."""

from __future__ import annotations

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return fp64 for fp64, and fp32 for all narrower types."""
    return torch.float64 if dtype == torch.float64 else torch.float32
