"""Decide whether a job may resume from a checkpoint, and at which step, by what has changed since. Pure functions.

A resumed run must be the same run as before: the same model, and the same sample order, because the cursor means
nothing in another order. A run that starts from another run's checkpoint (checkpoint.load) may change everything except
what determines the weights; with another sample order it begins at step 0, with these weights and moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatrain.checkpoint_format.manifest import Manifest, SampleStream
from megatrain.config.changes import model_changes, training_changes, weight_changes
from megatrain.config.config import Config
from megatrain.contracts.errors import CheckpointError, ConfigError
from megatrain.contracts.sample_ranges import SampleRanges


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
    """Where to resume, which samples to leave out, and what the log should say about it."""

    progress: TrainingProgress
    notes: tuple[str, ...]
    skipped: SampleRanges = ()


@dataclass(frozen=True, slots=True)
class Origin:
    """What a snapshot or checkpoint records about the job that made it; `location` names it in errors."""

    location: str
    config: Mapping[str, Any]
    data: SampleStream
    progress: TrainingProgress


def origin_of(manifest: Manifest, location: str) -> Origin:
    """Return the origin that a checkpoint's manifest describes."""
    progress = TrainingProgress(
        step=manifest.step,
        consumed_samples=manifest.consumed_samples,
        consumed_tokens=manifest.consumed_tokens,
        num_updates=manifest.num_updates,
        num_skipped=manifest.num_skipped,
    )
    return Origin(location, manifest.config, manifest.data, progress)


def continuation(origin: Origin, config: Config, data: SampleStream, *, is_same_run: bool) -> Continuation:
    """Return where a job with `config` and `data` resumes from the state of `origin`.

    Raises: CheckpointError when it may not.
    """
    location = origin.location
    try:
        before = Config.from_dict(origin.config)
    except ConfigError as error:
        raise CheckpointError(
            f"{location}: its configuration was written by another version of this program: {error}"
        ) from error
    changes = model_changes(before, config) if is_same_run else weight_changes(before, config)
    if changes:
        hint = (
            "restore these values, or begin another run (job.run_directory) with checkpoint.load"
            if is_same_run
            else "use the [model] section of its manifest.json"
        )
        raise CheckpointError(f"{location} holds a different model: {'; '.join(map(str, changes))}; {hint}")
    notes = [f"changed since: {change}" for change in model_changes(before, config)]
    if origin.data.num_tokens == 0 and not is_same_run:
        # imported weights: the training fields of their manifest are placeholders
        return Continuation(
            TrainingProgress(), (*notes, "weights that were trained elsewhere, so this run begins at step 0")
        )
    notes += [f"changed since: {change}" for change in training_changes(before, config)]
    notes += _notes_on_files(origin.data, data)
    is_known = origin.data.digest in ("", data.digest)
    if not is_known and data.digest == config.data.accepted_digest:
        notes.append(f"data.train has other content (digest {data.digest}), which data.accepted_digest accepts")
        is_known = True
    if is_known and _is_same_order(origin.data, data) and before.model.seq_len == config.model.seq_len:
        return Continuation(origin.progress, tuple(notes), origin.data.skipped)
    order = _order_text(origin.data)
    if is_same_run:
        accept = "" if is_known else f"; to use these data at the same cursor: data.accepted_digest={data.digest}"
        raise CheckpointError(
            f"{location}: its sample order belongs to {order}, but data.train={config.data.train!r} is "
            f"{_order_text(data)}, so the consumed samples are unknown; restore data.train and data.seed, or begin "
            f"another run (job.run_directory) with checkpoint.load{accept}"
        )
    notes.append(
        f"a different sample order (before: {order}), so this run begins at step 0 with these weights and moments"
    )
    return Continuation(replace(TrainingProgress(), num_updates=origin.progress.num_updates), tuple(notes))


def _order_text(data: SampleStream) -> str:
    digest = f" and digest {data.digest}" if data.digest else ""
    return f"data of {data.num_tokens} tokens{digest} with seed {data.seed}"


def _notes_on_files(before: SampleStream, now: SampleStream) -> list[str]:
    """Return notes on files that changed and do not affect the sample order, and on what cannot be compared."""
    notes = []
    if not before.digest:
        notes.append("the checkpoint has no digest of its data, so it is not known whether their content has changed")
    if before.validation_digest and now.validation_digest not in ("", before.validation_digest):
        notes.append("changed since: the content of data.validation; losses of evaluations before and after differ")
    if before.tokenizer_digest and now.tokenizer_digest not in ("", before.tokenizer_digest):
        notes.append("changed since: the content of data.tokenizer")
    return notes


def _is_same_order(before: SampleStream, now: SampleStream) -> bool:
    """Return whether a cursor means the same in both. Skipped samples do not change the order of the others."""
    return (before.num_tokens, before.seed) == (now.num_tokens, now.seed)
