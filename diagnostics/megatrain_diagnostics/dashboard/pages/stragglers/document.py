"""Who makes the job slow and why; what it costs; what each way out would gain and cost."""

from __future__ import annotations

from megatrain_diagnostics.dashboard.answers.document import Document, ThresholdsDocument


class FindingDocument(Document):
    """One straggler, as analysis/findings.py has it; units: seconds a step."""

    cause: str
    is_of_host: bool
    """Another host in its place would be faster."""
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
    """The answer of /stragglers.

    `source`: daemon (as it judged the running job), or events (computed from the store).
    """

    round: int
    source: str
    is_enough: bool
    headline: str
    first_step: int | None
    last_step: int | None
    num_steps: int
    findings: tuple[FindingDocument, ...]
    scores: tuple[HostScore, ...]
    """At the last step, the highest first, at most 100."""
    thresholds: ThresholdsDocument | None
    silent_ranks: tuple[int, ...]
    unjudged_ranks: tuple[int, ...]


class PartDocument(Document):
    """A part of the job; `slowdown`: of a job where all but this part is ideal."""

    name: str
    slowdown: float


class ActionBalance(Document):
    """A way out: what it would gain over the rest of the job and what it costs."""

    action: str
    target: str
    gain_s_per_step: float
    gain_s: float | None
    """Over the remaining steps; null where it is not known how many."""
    price_s: float | None
    is_worth_it: bool | None
    text: str


class WhatIfDocument(Document):
    """The answer of /whatif (analysis/whatif/metrics.py): S and its parts over the steps that were recorded in full."""

    round: int
    steps: tuple[int, ...]
    slowdown: float
    launch_slowdown: float
    waste: float
    measured_s: float
    """Of a step, on average."""
    replayed_s: float
    """Of a step played again: every operation as long as it was, nothing between them. S is this over `ideal_s`."""
    ideal_s: float
    """Of a step played again with every operation as long as its like are."""
    m_w: float
    m_s: float
    worst_ranks: tuple[int, ...]
    by_operation: tuple[PartDocument, ...]
    by_stage: tuple[PartDocument, ...]
    by_dp_rank: tuple[PartDocument, ...]
    slowdown_by_step: tuple[float, ...]
    by_cause: tuple[PartDocument, ...]
    """Findings of /stragglers as parts of a step: how much longer it takes for each cause."""
    advice: str
    """Empty where there are findings: they say more."""
    actions: tuple[ActionBalance, ...]
    notes: tuple[str, ...]
