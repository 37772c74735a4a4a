"""Types of the heat map's responses except the picture: one exact cell, and the ranks farthest above their peers."""

from __future__ import annotations

from megatrain_dashboard.responses.document import Document


class HeatCellDocument(Document):
    """The response of /heat/cell. If a cell has several ranks or steps: the one with the greatest value."""

    round: int
    operation: str
    measure: str
    rank: int
    host: str
    place: dict[str, int]
    """The place along each axis."""
    step: int
    unit: str
    """The unit of `value`, `peers_median` and `peers_spread`: s, spans, bytes, or the unit of a device reading."""
    value: float | None
    """Null: no value of this rank and step is known."""
    peers_median: float | None
    """The median of the ranks that do the same work; null: none of them has a value."""
    peers_spread: float | None
    num_peers: int
    ratio: float | None
    z: float | None


class HeatOutlierDocument(Document):
    """A rank in the step in which it was farthest above its peers."""

    rank: int
    host: str
    place: dict[str, int]
    """The place along each axis."""
    step: int
    value: float
    peers_median: float
    ratio: float | None
    z: float
    num_steps: int
    """The number of shown steps in which the rank was far above its peers: its z was `far_z` or more."""


class HeatOutliersDocument(Document):
    """The response of /heat/outliers: at most 20 ranks, the farthest first."""

    round: int
    operation: str
    measure: str
    unit: str
    far_z: float
    """The least z that counts as far above the peers: the least score of a straggler among this many ranks."""
    first_step: int | None
    last_step: int | None
    outliers: tuple[HeatOutlierDocument, ...]
