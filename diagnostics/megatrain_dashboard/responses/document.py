"""The base class of all documents, the document of a refusal, and documents that several others contain."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from megatrain.contracts.layout import AXES, Layout
from megatrain_diagnostics.analysis.findings import Thresholds


class Document(BaseModel):
    """The base of all documents: immutable, and without NaN and infinity, because JSON does not have them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def of(cls, source: object, /, **fields: Any) -> Self:
        """Return a document with these fields; every other field is the attribute of `source` with the same name."""
        return cls(**{name: getattr(source, name) for name in cls.model_fields.keys() - fields.keys()}, **fields)


class ErrorDocument(Document):
    """The body of every refusal."""

    error: str
    """A code for programs: unauthorized, forbidden, not-found, bad-request, too-large, too-many, unavailable or
    conflict."""
    text: str
    """A sentence for people: what was found, the rule, and a hint."""


class AxisDocument(Document):
    """An axis of the mesh. The place of a rank along it is rank // stride % size."""

    name: str
    word: str
    """The display name of a place along the axis."""
    size: int
    stride: int


class LayoutDocument(Document):
    """The layout of the ranks: the axes that describe a layout, in their order (contracts/layout.py)."""

    axes: tuple[AxisDocument, ...]
    world_size: int


def layout_document(layout: Layout) -> LayoutDocument:
    """Return the document of a layout."""
    axes = tuple(
        AxisDocument(name=axis.name, word=axis.word or axis.name, size=layout.size(axis.name),
                     stride=layout.stride(axis.name))
        for axis in AXES if axis.name in layout.axes
    )  # fmt: skip
    return LayoutDocument(axes=axes, world_size=layout.world_size)


class ThresholdsDocument(Document):
    """The least values of a straggler; a rank must reach all three."""

    excess: float
    """The rank's time above its peers, as a fraction of the compute time of its stage."""
    score: float
    num_steps: int
    """The number of steps in which the rank must reach the other two."""


def thresholds_document(thresholds: Thresholds | None) -> ThresholdsDocument | None:
    """Return the document of the thresholds; None where nothing was judged."""
    return None if thresholds is None else ThresholdsDocument.of(thresholds)
