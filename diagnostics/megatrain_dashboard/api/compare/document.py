"""Types of the comparison of runs: their metrics over the same steps, and the keys whose values differ."""

from __future__ import annotations

from megatrain_dashboard.responses.document import Document


class ComparedRun(Document):
    """One of the runs. The lists have an entry for each `step` of the document; null: the run has no such step."""

    name: str
    job: str
    first_step: int | None
    last_step: int | None
    loss: tuple[float | None, ...]
    step_s: tuple[float | None, ...]
    tokens_per_s: tuple[float | None, ...]
    mfu: tuple[float | None, ...]
    common_loss: float | None
    """The median loss of the newest twenty steps up to `common_step`."""
    median_step_s: float | None
    """This and the next two are medians over all steps that are shown."""
    median_tokens_per_s: float | None
    median_mfu: float | None
    num_ranks: int | None
    num_incidents: int
    effective_time_ratio: float | None
    training_s: float | None
    is_sampled: bool
    """The metrics are too many to read, so evenly spread pieces of them were read."""
    problems: tuple[str, ...]
    """What could not be read of the run."""


class ConfigDifference(Document):
    """A key in which the runs differ."""

    key: str
    """section.key"""
    values: tuple[str | None, ...]
    """The value of each run as TOML, defaults included; null: the configuration is not known."""


class CompareDocument(Document):
    """The response of /compare. An entry represents `stride` steps: the median of their measured values."""

    at_unix_s: float
    stride: int
    step: tuple[int, ...]
    """The last step of each entry."""
    common_step: int | None
    """The newest step that all of the runs have done."""
    runs: tuple[ComparedRun, ...]
    differences: tuple[ConfigDifference, ...]
    num_same: int
    """The number of keys that have the same value in all runs."""
