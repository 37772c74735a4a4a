"""Rules of the batch: its division into micro-batches, the ramp-up, and what the pipeline schedule needs.

They apply to every size that a step of the run may have, also in later stages, so that no stage fails when it begins.
The number of replicas need not divide the number of micro-batches (contracts/step_plan.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatrain.config.batch import BatchConfig, rampup_levels
from megatrain.config.checks.context import Context
from megatrain.config.config import Config
from megatrain.config.parallel import configurable_axes
from megatrain.config.problem import Problem, multiples_around
from megatrain.config.stages import DataStageConfig
from megatrain.contracts.step_plan import Dealing
from megatrain.formatting import alternatives
from megatrain.schedule import infeasibility, layout_infeasibilities

MICRO_BATCH_KEY = "batch.micro_batch_size"
RAMPUP_KEYS = ("batch.rampup_start", "batch.rampup_increment", "batch.rampup_samples", "batch.global_batch_size")
LAYOUT_KEYS = tuple(f"parallel.{axis.size_name}" for axis in configurable_axes())
PIPELINE_KEYS = ("parallel.schedule", "parallel.pp_size", "parallel.num_chunks")


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The batch sizes that the setting `key` leads to, evenly spaced and ascending. The last is the value of `key`."""

    key: str
    levels: Sequence[int]

    @property
    def keys(self) -> tuple[str, str]:
        return self.key, MICRO_BATCH_KEY


def batch_problems(context: Context) -> Iterator[Problem]:
    """Yield problems that make a step of the run impossible, at any batch size of the ramp-up and of later stages."""
    config = context.config
    rampup = list(_rampup_problems(config.batch))
    yield from rampup
    is_rampup_sound = not rampup and context.are_known(*RAMPUP_KEYS)
    levels = rampup_levels(config.batch) if is_rampup_sound else (config.batch.global_batch_size,)
    of_run = [_Sizes("batch.global_batch_size", levels)]
    for section, stage in config.sections_of("data_stage").items():
        if stage.global_batch_size:
            of_run.append(_Sizes(f"{section}.global_batch_size", (stage.global_batch_size,)))
        if is_rampup_sound:
            yield from _early_stage_problems(config, section, stage)
    for sizes in of_run:
        uneven = list(_division_problems(config.batch, sizes))
        yield from uneven
        if not uneven:
            yield from _schedule_problems(context, sizes)
            yield from _empty_slot_problems(context, sizes)


def _early_stage_problems(config: Config, section: str, stage: DataStageConfig) -> Iterator[Problem]:
    """Yield a problem if a stage that sets the batch size or the sample length begins during the ramp-up.

    The stage and the ramp-up would both determine the tokens of the same step.
    """
    batch, seq_len = config.batch, config.seq_len
    name = "global_batch_size" if stage.global_batch_size else "seq_len"
    size = getattr(stage, name)
    if size and stage.after_tokens and -(-stage.after_tokens // seq_len) < batch.rampup_samples:
        key, begin = f"{section}.{name}", f"{section}.after_tokens"
        yield Problem(
            (begin, key, "model.seq_len", "data.seq_len", *RAMPUP_KEYS),
            f"{begin}={stage.after_tokens} with {key}={size} begins during the ramp-up of the "
            f"batch, which lasts batch.rampup_samples={batch.rampup_samples} samples of {seq_len} tokens; use "
            f"after_tokens of at least {batch.rampup_samples * seq_len}, or a shorter ramp-up",
        )


def _rampup_problems(batch: BatchConfig) -> Iterator[Problem]:
    start, increment, samples = batch.rampup_start, batch.rampup_increment, batch.rampup_samples
    if start == 0:
        for name, value in (("rampup_increment", increment), ("rampup_samples", samples)):
            if value:
                yield Problem(
                    (f"batch.{name}", "batch.rampup_start"),
                    f"batch.{name}={value} does nothing with batch.rampup_start=0; set rampup_start or use {name}=0",
                )
        return
    for name, value in (("rampup_increment", increment), ("rampup_samples", samples)):
        if value == 0:
            yield Problem(
                ("batch.rampup_start", f"batch.{name}"),
                f"batch.rampup_start={start} needs batch.{name} of at least 1, found 0; "
                f"set {name}, or use rampup_start=0 for no ramp-up",
            )
    full = batch.global_batch_size
    if start >= full:
        yield Problem(
            ("batch.rampup_start", "batch.global_batch_size"),
            f"batch.rampup_start={start} must be less than batch.global_batch_size={full}; "
            f"use a smaller start, or 0 for no ramp-up",
        )
    elif increment and (full - start) % increment:
        steps = (full - start) // increment
        lower = full - max(1, steps) * increment
        fitting = [f"rampup_start={lower}"] * (lower > 0) + [f"global_batch_size={start + (steps + 1) * increment}"]
        yield Problem(
            ("batch.rampup_increment", "batch.rampup_start", "batch.global_batch_size"),
            f"batch.rampup_increment={increment} must divide global_batch_size - rampup_start = {full} - {start} = "
            f"{full - start}; use {' or '.join(fitting)}",
        )


def _division_problems(batch: BatchConfig, sizes: _Sizes) -> Iterator[Problem]:
    levels, part = sizes.levels, batch.micro_batch_size
    full = levels[-1]
    divisor = f"batch.micro_batch_size={part}"
    if full % part:
        fitting = alternatives(multiples_around(part, full))
        yield Problem(sizes.keys, f"{sizes.key}={full} must be divisible by {divisor}; use {fitting}")
        return
    # If the first two levels can be divided, all can.
    for level in levels[:-1][:2]:
        if level % part:
            steps = f"batch.rampup_start={batch.rampup_start} with batch.rampup_increment={batch.rampup_increment}"
            rule = f"{steps} reaches a global batch of {level}, which must be divisible by {divisor}"
            yield Problem((*RAMPUP_KEYS, *sizes.keys), f"{rule}; use multiples of {part} for both")
            return


def _schedule_problems(context: Context, sizes: _Sizes) -> Iterator[Problem]:
    parallel, batch, levels = context.config.parallel, context.config.batch, sizes.levels
    # An impossible combination of schedule, stages and chunks is reported by the layout's own rules.
    if any(layout_infeasibilities(parallel.schedule, parallel.pp_size, parallel.num_chunks)):
        return
    # A single replica has the most micro-batches: what is impossible with one replica is impossible with several.
    num_parts = context.num_sample_parts or 1
    part = batch.micro_batch_size * num_parts
    # The smallest batch of the run is the critical one: a schedule can have too few micro-batches, never too many. The
    # replica with the most micro-batches must fill the pipeline; only replicas with fewer may have empty slots.
    smallest = levels[0]
    reason = _infeasibility(context, sizes.key, Dealing(smallest // batch.micro_batch_size, num_parts).num_own(0))
    if reason is None:
        return
    rampup = "" if len(levels) == 1 else f" (level {smallest} of the ramp-up)"
    assumed = "" if context.num_sample_parts else " with dp_size=1, which is assumed as the most lenient case"
    fitting = next((count for count in (1, parallel.pp_size) if not _infeasibility(context, sizes.key, count)), None)
    hint = "" if fitting is None else f"; the smallest batch that fills every pipeline is {fitting * part}"
    layout_keys = LAYOUT_KEYS if context.num_sample_parts else ()
    keys = (*sizes.keys, *layout_keys, *PIPELINE_KEYS, *(RAMPUP_KEYS if rampup else ()))
    yield Problem(keys, f"{sizes.key}={levels[-1]}{rampup}{assumed}: {reason}{hint}")


def _empty_slot_problems(context: Context, sizes: _Sizes) -> Iterator[Problem]:
    """Yield a problem if empty slots would change the results: delayed scales depend on the magnitudes in them."""
    config, layout, levels = context.config, context.layout, sizes.levels
    if not (config.fp8.is_used and config.fp8.scaling == "delayed") or layout is None:
        return
    # If neither the smallest nor the second level has empty slots, no level has.
    for level in dict.fromkeys((*levels[:2], levels[-1])):
        dealing = config.dealing(layout, level)
        last = dealing.num_replicas - 1
        if dealing.has_empty_slots:
            part = config.batch.micro_batch_size * dealing.num_replicas
            # without empty slots, each replica has to fill its pipeline
            enough = (max(multiple, part * dealing.least_slots) for multiple in multiples_around(part, level))
            fitting = alternatives(tuple(dict.fromkeys(enough)))
            yield Problem(
                ("fp8.scaling", *sizes.keys, *LAYOUT_KEYS, *PIPELINE_KEYS, "parallel.zero_stage"),
                f'fp8.scaling="delayed" allows no empty micro-batches, as their magnitudes would change the scales; '
                f"a global batch of {level} is {dealing.num_microbatches} micro-batches for {dealing.num_replicas} "
                f"replicas, and the last has {dealing.num_own(last)} for {dealing.num_slots(last)} slots; use "
                f'scaling="current" or a batch of {fitting}',
            )
            return


def _infeasibility(context: Context, batch_key: str, num_microbatches: int) -> str | None:
    parallel = context.config.parallel
    return infeasibility(parallel.schedule, parallel.pp_size, parallel.num_chunks, num_microbatches, batch_key)
