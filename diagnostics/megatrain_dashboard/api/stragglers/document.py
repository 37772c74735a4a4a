"""The documents about stragglers: which ranks or hosts are slow and why, and what each remedy gains and costs."""

from __future__ import annotations

from megatrain_dashboard.responses.document import Document, ThresholdsDocument


class FindingDocument(Document):
    """One straggler: a `Finding` of analysis/findings.py. Durations (`_s`) are seconds per step."""

    cause: str
    is_of_host: bool
    """Whether another host in its place would be faster."""
    confidence: str
    hosts: tuple[str, ...]
    ranks: tuple[int, ...]
    stage: int | None
    first_step: int
    last_step: int
    num_seen: int
    num_steps: int
    is_over: bool
    excess: float
    excess_s: float
    score: float
    gain_s: float
    step_s: float
    num_victims: int
    evidence: tuple[str, ...]


class HostScore(Document):
    host: str
    score: float


class StragglersDocument(Document):
    """The response of /stragglers.

    `source`: daemon (as it judged the running job), or events (computed from the store).
    """

    round: int
    source: str
    is_enough: bool
    """Whether enough steps were compared and each rank has peers. If so, and `findings` is empty, no rank is slow."""
    headline: str
    first_step: int | None
    last_step: int | None
    num_steps: int
    findings: tuple[FindingDocument, ...]
    scores: tuple[HostScore, ...]
    """The scores at the last step, the highest first, at most 100."""
    thresholds: ThresholdsDocument | None
    silent_ranks: tuple[int, ...]
    """Ranks that sent no event in the newest compared steps."""
    ranks_without_peers: tuple[int, ...]
    """Ranks that are compared with no other rank, because none does the same work."""


class PartDocument(Document):
    """A part of the job; `slowdown`: the slowdown of a job in which everything except this part is ideal."""

    name: str
    slowdown: float


class ActionBalance(Document):
    """A remedy: what it would gain over the rest of the job and what it costs."""

    action: str
    target: str
    gain_s_per_step: float
    gain_s: float | None
    """The gain over the remaining steps; null where their number is not known."""
    cost_s: float | None
    is_worth_it: bool | None
    text: str


class WhatIfDocument(Document):
    """The response of /whatif (analysis/whatif/metrics.py): slowdown S and its parts over steps recorded in full."""

    round: int
    steps: tuple[int, ...]
    slowdown: float
    launch_slowdown: float
    """The measured time of a step divided by its time without gaps between operations, which S does not include."""
    waste: float
    """The fraction of all GPU-hours that is lost to stragglers."""
    measured_s: float
    """The average time of a step."""
    replayed_s: float
    """The time of a replayed step: every operation takes its measured time, without time between operations.
    S is this divided by `ideal_s`."""
    ideal_s: float
    """The time of a replayed step in which every operation takes the typical time of operations of its kind."""
    m_w: float
    """M_W: the fraction of the slowdown that would disappear if the slowest 3 % of the workers were ideal."""
    m_s: float
    """M_S: the fraction of the slowdown that would disappear if the last stage were ideal. It has no meaning without a
    pipeline."""
    worst_ranks: tuple[int, ...]
    by_operation: tuple[PartDocument, ...]
    by_stage: tuple[PartDocument, ...]
    by_dp_rank: tuple[PartDocument, ...]
    slowdown_by_step: tuple[float, ...]
    by_cause: tuple[PartDocument, ...]
    """The findings of /stragglers as parts of a step: how much longer it takes because of each cause."""
    advice: str
    """Empty where there are findings, because they are more precise."""
    actions: tuple[ActionBalance, ...]
    notes: tuple[str, ...]
