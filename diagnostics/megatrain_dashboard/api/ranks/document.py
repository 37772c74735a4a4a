"""Types of the responses about one rank and about a hang."""

from __future__ import annotations

from megatrain_dashboard.responses.document import Document


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
    """The outermost frame first."""


class RankDocument(Document):
    """The response of /ranks/{rank}."""

    round: int
    rank: int
    host: str
    place: dict[str, int]
    """The place along each axis."""
    pid: int | None
    step: int | None
    operation: str
    """The operation that the rank is in, or was in last; empty: not known."""
    phase: str
    process_state: str
    score: float | None
    least_score: float | None
    """The least score of a straggler."""
    groups: tuple[PeerGroupDocument, ...]
    positions: tuple[RankPositionDocument, ...]
    stacks: tuple[StackDocument, ...]
    black_box: str
    """The rank's black box file that was kept, relative to the run directory; empty: none."""
    findings: tuple[str, ...]
    """Sentences of the findings and hang suspects that concern the rank."""


class HangSuspectDocument(Document):
    rank: int
    host: str
    place: dict[str, int]
    """The place along each axis."""
    step: int
    doing: str
    evidence: str


class HangMissingDocument(Document):
    """A collective in which the ranks `waiting` wait for `absent` ranks, which never entered it, and `silent` ranks."""

    group: str
    sequence: int
    waiting: tuple[int, ...]
    absent: tuple[int, ...]
    silent: tuple[int, ...]
    not_waiting: tuple[int, ...]


class StackClusterDocument(Document):
    num_ranks: int
    ranks: tuple[int, ...]
    """At most 64 of the ranks."""
    is_waiting: bool
    frames: tuple[str, ...]


class HangDocument(Document):
    """The response of /hang; `source` empty: no hang of this round is known."""

    round: int
    source: str
    confidence: str
    reason: str
    incident_id: str
    """The incident that names the suspects; empty: only their positions indicate them."""
    suspects: tuple[HangSuspectDocument, ...]
    missing: tuple[HangMissingDocument, ...]
    silent: tuple[int, ...]
    waiting: tuple[int, ...]
    stack_clusters: tuple[StackClusterDocument, ...]
    outlier_ranks: tuple[int, ...]
