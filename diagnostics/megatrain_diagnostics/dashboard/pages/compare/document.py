"""Runs side by side: how each went over the same steps, and in which keys their configurations differ."""

from __future__ import annotations

from megatrain_diagnostics.dashboard.answers.document import Document


class ComparedRun(Document):
    """One of the runs. The lists have an entry for each of `step` of the document; null: it has no such step."""

    name: str
    job: str
    first_step: int | None
    last_step: int | None
    loss: tuple[float | None, ...]
    step_s: tuple[float | None, ...]
    tokens_per_s: tuple[float | None, ...]
    mfu: tuple[float | None, ...]
    common_loss: float | None
    """Median of the newest twenty steps up to `common_step`."""
    median_step_s: float | None
    """Of all steps that are shown, as the two below."""
    median_tokens_per_s: float | None
    median_mfu: float | None
    num_ranks: int | None
    num_incidents: int
    effective_time_ratio: float | None
    training_s: float | None
    is_sampled: bool
    """Its metrics are many: evenly spread pieces of them were read."""
    problems: tuple[str, ...]
    """What of it could not be read."""


class ConfigDifference(Document):
    """A key in which the runs differ."""

    key: str
    """section.key"""
    values: tuple[str | None, ...]
    """As TOML has them, defaults too, by run; null: its configuration is not known."""


class CompareDocument(Document):
    """The answer of /compare. An entry stands for `stride` steps: the median of what was measured in them."""

    at_unix_s: float
    stride: int
    step: tuple[int, ...]
    """The last one of each entry."""
    common_step: int | None
    """The newest that all of the runs have done."""
    runs: tuple[ComparedRun, ...]
    differences: tuple[ConfigDifference, ...]
    num_same: int
    """Keys that are the same in all runs."""
