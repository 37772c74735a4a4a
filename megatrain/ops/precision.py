"""Dtypes by name, and the dtype of sums, of statistics and of everything that accumulates over steps."""

from __future__ import annotations

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return fp64 for fp64, and fp32 for all narrower dtypes."""
    return torch.float64 if dtype == torch.float64 else torch.float32
