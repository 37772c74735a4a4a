"""One rank: where it is, who its peers are, what it said last."""

from __future__ import annotations

from megatrain_diagnostics.dashboard.answers.document import Document


class PeerGroupDocument(Document):
    name: str
    first_rank: int
    num_ranks: int
    stride: int


class RankPositionDocument(Document):
    """The last collectives of a group that the rank entered and left."""

    group: str
    entered: int
    left: int


class StackDocument(Document):
    thread: str
    at_unix_s: float
    frames: tuple[str, ...]
    """Outermost first."""


class RankDocument(Document):
    """The answer of /ranks/{rank}."""

    round: int
    rank: int
    host: str
    place: dict[str, int]
    """Along each axis."""
    pid: int | None
    step: int | None
    operation: str
    """It is in, or was in last; empty: not known."""
    phase: str
    process_state: str
    score: float | None
    least_score: float | None
    """Of a straggler."""
    groups: tuple[PeerGroupDocument, ...]
    positions: tuple[RankPositionDocument, ...]
    stacks: tuple[StackDocument, ...]
    black_box: str
    """The file that is kept of it, below the run directory; empty: none."""
    findings: tuple[str, ...]
    """Sentences of findings and of hang suspects that are about it."""


class HangSuspectDocument(Document):
    rank: int
    host: str
    place: dict[str, int]
    """Along each axis."""
    step: int
    doing: str
    evidence: str


class HangMissingDocument(Document):
    """A collective that some wait in: `waiting` wait for `absent` (never entered) and `silent` ones."""

    group: str
    sequence: int
    waiting: tuple[int, ...]
    absent: tuple[int, ...]
    silent: tuple[int, ...]
    loitering: tuple[int, ...]


class HangDocument(Document):
    """The answer of /hang; `source` empty: nothing is known of any hang of this round."""

    round: int
    source: str
    confidence: str
    reason: str
    incident_id: str
    """Of the incident that blames the suspects; empty: their places alone do."""
    suspects: tuple[HangSuspectDocument, ...]
    missing: tuple[HangMissingDocument, ...]
    silent: tuple[int, ...]
    waiting: tuple[int, ...]
    stack_clusters: tuple[StackClusterDocument, ...]
    outlier_ranks: tuple[int, ...]


class StackClusterDocument(Document):
    num_ranks: int
    ranks: tuple[int, ...]
    """At most 64 of them."""
    is_waiting: bool
    frames: tuple[str, ...]


HangDocument.model_rebuild()
