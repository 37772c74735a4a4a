"""The heat map beside its picture: one cell exactly, and who is farthest from their peers."""

from __future__ import annotations

from megatrain_diagnostics.dashboard.answers.document import Document


class HeatCellDocument(Document):
    """The answer of /heat/cell. Of several ranks or steps in a cell, the one that gives the cell its colour."""

    round: int
    operation: str
    measure: str
    rank: int
    host: str
    place: dict[str, int]
    """Along each axis."""
    step: int
    unit: str
    """Of `value`, `peers_median` and `peers_spread`: s, spans or bytes."""
    value: float | None
    """Null: nothing is known of this rank and step."""
    peers_median: float | None
    """Of the ranks that do the same work; null: none of them came."""
    peers_spread: float | None
    num_peers: int
    ratio: float | None
    z: float | None


class HeatOutlierDocument(Document):
    """A rank in the step in which it was farthest above its peers."""

    rank: int
    host: str
    place: dict[str, int]
    """Along each axis."""
    step: int
    value: float
    peers_median: float
    ratio: float | None
    z: float
    num_steps: int
    """In so many of the steps shown it was far above its peers: its z was `far_z` or more."""


class HeatOutliersDocument(Document):
    """The answer of /heat/outliers: at most 20 ranks, the farthest first."""

    round: int
    operation: str
    measure: str
    unit: str
    far_z: float
    """The least score of a straggler among so many ranks."""
    first_step: int | None
    last_step: int | None
    outliers: tuple[HeatOutlierDocument, ...]
