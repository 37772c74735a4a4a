"""Whether a job may go on from a checkpoint, and from where: what has changed since decides. Pure.

A run that goes on must be the run that was: the same model, and the same sample order, or the cursor means nothing.
A run that starts from another's checkpoint (checkpoint.load) may change all but the weights; with another sample order
it begins at step 0, with these weights and moments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatrain.config.changes import model_changes, training_changes, weight_changes
from megatrain.config.config import Config
from megatrain.contracts.errors import CheckpointError, ConfigError
from megatrain.contracts.manifest import Manifest, SampleStream


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
    """Where to go on, and what the log should say about it."""

    progress: Progress
    notes: tuple[str, ...]


def continuation(
    manifest: Manifest, config: Config, data: SampleStream, place: str, *, is_same_run: bool
) -> Continuation:
    """Return where a job with `config` and `data` goes on from the checkpoint of `manifest`; `place` names it.

    Raises: CheckpointError when it cannot.
    """
    try:
        before = Config.from_dict(manifest.config)
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
    progress = Progress(
        step=manifest.step,
        consumed_samples=manifest.consumed_samples,
        consumed_tokens=manifest.consumed_tokens,
        num_updates=manifest.num_updates,
        num_skipped=manifest.num_skipped,
    )
    notes = [
        f"changed since: {change}" for change in (*model_changes(before, config), *training_changes(before, config))
    ]
    if manifest.data == data and before.model.seq_len == config.model.seq_len:
        return Continuation(progress, tuple(notes))
    order = f"data of {manifest.data.num_tokens} tokens with seed {manifest.data.seed}"
    if is_same_run:
        raise CheckpointError(
            f"{place}: its sample order is that of {order}, now there are {data.num_tokens} tokens with seed "
            f"{data.seed}, and what was consumed cannot be told; set data.train and data.seed back, or begin another "
            "run (job.run_directory) with checkpoint.load"
        )
    notes.append(f"another sample order (before: {order}), so this run begins at step 0 with these weights and moments")
    return Continuation(replace(Progress(), num_updates=progress.num_updates), tuple(notes))
