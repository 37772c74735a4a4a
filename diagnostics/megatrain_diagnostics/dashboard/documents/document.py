"""What all documents have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Document(BaseModel):
    """Cannot be changed once made; holds no number that is none: JSON has no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
