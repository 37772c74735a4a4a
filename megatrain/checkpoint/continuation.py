"""Whether a job may go on from a checkpoint, and from where: what has changed since decides. Pure.

A resumed run must be the same run as before: the same model, and the same sample order, or the cursor means nothing.
A run that starts from another's checkpoint (checkpoint.load) may change all but the weights; with another sample order
it begins at step 0, with these weights and moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatrain.config.changes import model_changes, training_changes, weight_changes
from megatrain.config.config import Config
from megatrain.contracts.errors import CheckpointError, ConfigError
from megatrain.contracts.manifest import Manifest, SampleStream
from megatrain.contracts.sample_ranges import SampleRanges


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job has come. `num_updates` is below `step` by the skipped steps."""

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    num_updates: int = 0
    num_skipped: int = 0


@dataclass(frozen=True, slots=True)
class Continuation:
    """Where to resume, which samples to leave out, and what the log should say about it."""

    progress: Progress
    notes: tuple[str, ...]
    skipped: SampleRanges = ()


@dataclass(frozen=True, slots=True)
class Origin:
    """What a snapshot or checkpoint says of the job that made it; `place` names it in errors."""

    place: str
    config: Mapping[str, Any]
    data: SampleStream
    progress: Progress


def origin_of(manifest: Manifest, place: str) -> Origin:
    """Return the origin that a checkpoint's manifest tells."""
    progress = Progress(
        step=manifest.step,
        consumed_samples=manifest.consumed_samples,
        consumed_tokens=manifest.consumed_tokens,
        num_updates=manifest.num_updates,
        num_skipped=manifest.num_skipped,
    )
    return Origin(place, manifest.config, manifest.data, progress)


def continuation(origin: Origin, config: Config, data: SampleStream, *, is_same_run: bool) -> Continuation:
    """Return where a job with `config` and `data` goes on from the state of `origin`.

    Raises: CheckpointError when it cannot.
    """
    place = origin.place
    try:
        before = Config.from_dict(origin.config)
    except ConfigError as error:
        raise CheckpointError(f"{place}: its configuration is of another version of this program: {error}") from error
    changes = model_changes(before, config) if is_same_run else weight_changes(before, config)
    if changes:
        way_out = (
            "set them back, or begin another run (job.run_directory) with checkpoint.load"
            if is_same_run
            else "use the [model] section of its manifest.json"
        )
        raise CheckpointError(f"{place} holds another model: {'; '.join(map(str, changes))}; {way_out}")
    notes = [f"changed since: {change}" for change in model_changes(before, config)]
    if origin.data.num_tokens == 0 and not is_same_run:
        # weights that were imported: what their manifest says of training are stand-ins
        return Continuation(Progress(), (*notes, "weights that were trained elsewhere, so this run begins at step 0"))
    notes += [f"changed since: {change}" for change in training_changes(before, config)]
    if _is_same_order(origin.data, data) and before.model.seq_len == config.model.seq_len:
        return Continuation(origin.progress, tuple(notes), origin.data.skipped)
    order = f"data of {origin.data.num_tokens} tokens with seed {origin.data.seed}"
    if is_same_run:
        raise CheckpointError(
            f"{place}: its sample order is that of {order}, now there are {data.num_tokens} tokens with seed "
            f"{data.seed}, and the consumed samples are unknown; set data.train and data.seed back, or begin another "
            "run (job.run_directory) with checkpoint.load"
        )
    notes.append(f"another sample order (before: {order}), so this run begins at step 0 with these weights and moments")
    return Continuation(replace(Progress(), num_updates=origin.progress.num_updates), tuple(notes))


def _is_same_order(before: SampleStream, now: SampleStream) -> bool:
    """Say whether a cursor means the same in both. What is left out has no other place in the order."""
    return (before.num_tokens, before.seed) == (now.num_tokens, now.seed)
