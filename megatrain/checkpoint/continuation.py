"""Decide from the changes since a checkpoint whether a job may resume from it, and at which step. Pure functions.

A resumed run must have the same model and the same sample order as before, because the data cursor is a position in
that order. A run that starts from another run's checkpoint (checkpoint.load) may change everything except what
determines the weights; with another sample order it begins at step 0, with these weights and moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatrain.checkpoint.continued_lengths import lengths_problem, with_aligned_lengths
from megatrain.checkpoint.continued_stream import continued_stream, has_same_stages
from megatrain.checkpoint_format.manifest import Manifest
from megatrain.checkpoint_format.sample_stream import SampleStream
from megatrain.config.changes import model_changes, run_changes, training_changes, weight_changes
from megatrain.config.config import Config
from megatrain.contracts.errors import CheckpointError, ConfigError


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """How far a job has come. `num_updates` is `step` minus the skipped steps."""

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    num_updates: int = 0
    num_skipped: int = 0


@dataclass(frozen=True, slots=True)
class Continuation:
    """Where to resume, in which sample order, and messages for the log."""

    progress: TrainingProgress
    stream: SampleStream
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """The record of a snapshot or checkpoint about the job that made it.

    `location` names it in errors; `manifest`: the name of its manifest, "" for a snapshot in memory.
    """

    location: str
    config: Mapping[str, Any]
    data: SampleStream
    progress: TrainingProgress
    manifest: str = ""


def origin_of(manifest: Manifest, location: str) -> Origin:
    """Return the origin that a checkpoint's manifest describes."""
    progress = TrainingProgress(
        step=manifest.step,
        consumed_samples=manifest.consumed_samples,
        consumed_tokens=manifest.consumed_tokens,
        num_updates=manifest.num_updates,
        num_skipped=manifest.num_skipped,
    )
    return Origin(location, manifest.config, manifest.data, progress, manifest.file_name())


def continuation(origin: Origin, config: Config, data: SampleStream, *, is_same_run: bool) -> Continuation:
    """Return where a job with `config` and `data` resumes from the state of `origin`.

    Raises: CheckpointError when the job cannot resume from this state, with the changes to undo.
    """
    location = origin.location
    try:
        before = Config.from_dict(origin.config)
    except ConfigError as error:
        raise CheckpointError(
            f"{location}: its configuration is not valid in this version of megatrain: {error}"
        ) from error
    changes = run_changes(before, config) if is_same_run else weight_changes(before, config)
    if changes:
        hint = (
            "restore these values, or begin another run (job.run_directory) with checkpoint.load"
            if is_same_run
            else f"use the [model] section of its {origin.manifest}"
        )
        raise CheckpointError(f"{location} holds a different model: {'; '.join(map(str, changes))}; {hint}")
    notes = [f"changed since: {change}" for change in model_changes(before, config)]
    if not origin.data.sources and not is_same_run:
        # imported weights: the training fields of their manifest are placeholders
        return Continuation(
            TrainingProgress(), data, (*notes, "the weights were trained elsewhere, so this run begins at step 0")
        )
    notes += [f"changed since: {change}" for change in training_changes(before, config)]
    notes += _notes_on_files((before, origin.data), (config, data))
    found = continued_stream(origin.data, data, origin.progress.consumed_samples, accepted_digests(config))
    problem = found.problem or lengths_problem(
        origin.data, data, origin.progress.consumed_samples, origin.progress.consumed_tokens, config.batch_schedule
    )
    if is_same_run and problem:
        raise CheckpointError(
            f"{location}: its sample order differs: {problem}; restore the data and data.seed, or begin another "
            "run (job.run_directory) with checkpoint.load"
        )
    if is_same_run or (not problem and has_same_stages(found.stream, origin.data)):
        stream = with_aligned_lengths(found.stream, config.batch_schedule, origin.progress.consumed_samples)
        return Continuation(origin.progress, stream, (*notes, *found.notes))
    reason = problem or "the mixture differs"
    notes.append(f"the sample order differs ({reason}), so this run begins at step 0 with these weights and moments")
    return Continuation(replace(TrainingProgress(), num_updates=origin.progress.num_updates), data, tuple(notes))


def accepted_digests(config: Config) -> list[str]:
    """Return the digests that data.accepted_digest accepts instead of the recorded digests of sources."""
    return config.data.accepted_digest.split(",")


def _notes_on_files(before: tuple[Config, SampleStream], now: tuple[Config, SampleStream]) -> list[str]:
    """Return notes on files that changed and do not affect the sample order."""
    known = _validation_digests(*before)
    notes = [
        f"changed since: the content of {name} (digest {known[name]} -> {digest}); losses of evaluations before and "
        "after differ"
        for name, digest in _validation_digests(*now).items()
        if known.get(name, digest) != digest
    ]
    old, new = (data.tokenizer_digest for _, data in (before, now))
    if old and new and old != new:
        notes.append(f"changed since: the content of data.tokenizer (digest {old} -> {new})")
    return notes


def _validation_digests(config: Config, data: SampleStream) -> dict[str, str]:
    """Return the digest of each validation set by its name; empty if the digests are unknown."""
    names = [validation_set.resolved_name for validation_set in config.validation_sets.values()]
    digests = data.validation_digest.split(",") if data.validation_digest else []
    return dict(zip(names, digests, strict=True)) if len(names) == len(digests) else {}
