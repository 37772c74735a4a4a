"""What all documents have in common, the one that every refusal is, and those that several pages hold."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from megatrain.contracts.layout import AXES, Layout


class Document(BaseModel):
    """Cannot be changed once made; holds no number that is none: JSON has no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ErrorDocument(Document):
    """The body of every refusal."""

    error: str
    """A word for programs: unauthorized, forbidden, not-found, bad-request, too-large, too-many, unavailable or
    conflict."""
    text: str
    """A sentence for people: what was found, the rule, the way out."""


class AxisDocument(Document):
    """An axis of the mesh. The place of a rank along it is rank // stride % size."""

    name: str
    word: str
    """What people call a place on it."""
    size: int
    stride: int


class LayoutDocument(Document):
    """How the ranks are laid out: the axes that a layout is told by, in their order (contracts/layout.py)."""

    axes: tuple[AxisDocument, ...]
    world_size: int


def layout_document(layout: Layout) -> LayoutDocument:
    """Return a layout as pages have it."""
    axes = tuple(
        AxisDocument(name=axis.name, word=axis.word or axis.name, size=layout.size(axis.name),
                     stride=layout.stride(axis.name))
        for axis in AXES if axis.name in layout.axes
    )  # fmt: skip
    return LayoutDocument(axes=axes, world_size=layout.world_size)


class ThresholdsDocument(Document):
    """From which values on a rank is a straggler; all three must be reached."""

    excess: float
    """Over its peers, as a part of what its stage computes."""
    score: float
    num_steps: int
    """In so many steps."""
