"""The sample order of a job that resumes: each source continues at its position; a new mixture begins at the cursor.

Sources are recognized by the digest of their content, else by name. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from megatrain.checkpoint_format.sample_stream import MixtureStage, SampleStream, StreamSource
from megatrain.contracts.sample_ranges import position_after
from megatrain.formatting import count_text

_MAX_NOTES = 3
"""The log lists at most this many later stages of the mixture."""


@dataclass(frozen=True, slots=True)
class ContinuedStream:
    """The stream from here on, and messages for the log. `problem`: why the job cannot continue in it; else empty."""

    stream: SampleStream
    notes: tuple[str, ...] = ()
    problem: str = ""


def continued_stream(
    before: SampleStream, now: SampleStream, cursor: int, accepted: Collection[str] = ()
) -> ContinuedStream:
    """Return the stream of a job that resumes at sample `cursor` of `before` with the sources of `now`.

    accepted: digests that are accepted instead of a source's recorded digest. Sources that are no longer configured
    keep their place with weight 0, so that they continue at their position if they are configured again. If the mixture
    of `now` differs from that of `before`, it begins at the cursor, or after the last sample that `before` skips: the
    numbers of skipped samples refer to the mixture of `before`. Later stages of `now` begin at their planned samples.
    """
    if not before.sources:
        return ContinuedStream(now, problem="no training took place in it")
    if before.seed != now.seed:
        return ContinuedStream(
            now, problem=f"its samples were drawn with seed {before.seed}, and data.seed is {now.seed}"
        )
    parts = [(one.block_tokens, one.part_tokens) for one in (before, now)]
    if parts[0] != parts[1]:
        keys = "data.block_tokens and data.part_tokens"
        return ContinuedStream(now, problem=f"{keys} were {parts[0]}, and are {parts[1]}")
    if before.packing != now.packing:
        packings = [one.packing or "none" for one in (before, now)]
        return ContinuedStream(now, problem=f"data.packing was {packings[0]}, and is {packings[1]}")
    if before.pictures != now.pictures:
        made = [f"pictures from shards, made by {one.pictures}" if one.pictures else "no pictures from shards"
                for one in (before, now)]  # fmt: skip
        problem = f"it had {made[0]}, and now has {made[1]}: pixels or tokens would differ"
        return ContinuedStream(now, problem=problem)
    places = _places(now.sources, before.sources)
    sources, notes, problem = _recognized(before.sources, now.sources, places, accepted)
    if problem:
        return ContinuedStream(now, problem=problem)
    planned = [replace(stage, weights=_placed(stage.weights, places, len(sources))) for stage in now.stages]
    begin = first_changeable(before, cursor)
    # stages of `before` after `begin` were not reached: the job went back, or they were only planned
    stages = [stage for stage in before.stages if stage.first_sample < max(begin, 1)]
    current = [stage for stage in planned if stage.first_sample <= begin][-1]
    # a stage that is planned to begin there begins a block of samples, even if its weights are the same
    if current.first_sample == begin or not _is_same_mixture(stages[-1], current):
        stages = [stage for stage in stages if stage.first_sample < begin]
        stages.append(replace(current, first_sample=begin))
    stages += [stage for stage in planned if stage.first_sample > begin]
    ahead = [stage for stage in stages if stage.first_sample > cursor or not _has_stage(before, stage)]
    notes += [_stage_text(sources, stage) for stage in ahead[:_MAX_NOTES]]
    if len(ahead) > _MAX_NOTES:
        rest = len(ahead) - _MAX_NOTES
        notes.append(f"{count_text(rest, 'further stage')} of the mixture follow{'s' if rest == 1 else ''}")
    stream = replace(now, sources=tuple(sources), stages=tuple(stages), skipped=before.skipped)
    problem = _missing_problem(stream, places, cursor)
    if problem:
        return ContinuedStream(now, problem=problem)
    return ContinuedStream(stream, tuple(notes))


def first_changeable(stream: SampleStream, cursor: int) -> int:
    """Return the first sample whose mixture or length may change when a job resumes at sample `cursor`.

    It comes after the skipped samples, because their numbers refer to the stages of `stream`.
    """
    return max((end for _, end in stream.skipped if end > cursor), default=cursor)


def _recognized(
    known: Sequence[StreamSource], sources: Sequence[StreamSource], places: Sequence[int], accepted: Collection[str]
) -> tuple[list[StreamSource], list[str], str]:
    """Return all sources in the order of their places, notes for the log, and a problem if some content changed."""
    found, notes = list(known), list[str]()
    for source, place in zip(sources, places, strict=True):
        if place == len(found):
            found.append(source)
            continue
        before = found[place]
        problem = _content_problem(before, source, accepted)
        if problem:
            return found, notes, problem
        if before.digest and source.digest != before.digest:
            notes.append(
                f"{source.name} has other content (digest {source.digest}), which data.accepted_digest accepts"
            )
        elif not before.digest and source.digest:
            notes.append(
                f"the checkpoint has no digest of {source.name}, so it is not known whether its content has changed"
            )
        found[place] = source
    return found, notes, ""


def _missing_problem(stream: SampleStream, places: Collection[int], cursor: int) -> str:
    """Return why samples from the cursor on cannot be read: their source is gone. Empty if all can.

    Samples that are skipped need no source.
    """
    ends = [*(stage.first_sample for stage in stream.stages[1:]), None]
    for stage, end in zip(stream.stages, ends, strict=True):
        missing = [place for place, weight in enumerate(stage.weights) if weight and place not in places]
        first_read = position_after(max(cursor, stage.first_sample), 0, stream.skipped)
        if missing and (end is None or end > first_read):
            until = "" if end is None else f", until sample {end}"
            return (
                f"its samples from {first_read} on come from {stream.sources[missing[0]].name}, too{until}, and no "
                "source of the configuration has these tokens; name it again with weight=0"
            )
    return ""


def has_same_stages(first: SampleStream, second: SampleStream) -> bool:
    """Return whether two streams have the same mixture at every sample, in stages that begin at the same samples."""
    return len(first.stages) == len(second.stages) and all(_has_stage(second, stage) for stage in first.stages)


def with_later_stages(before: SampleStream, newest: SampleStream | None, cursor: int) -> SampleStream:
    """Return `before` with the stages of `newest`, the newest known stream, for a job that goes back to `cursor`.

    So the numbers of the samples to skip refer to the same samples as before. Returns `before` if the streams differ
    before the cursor.
    """
    reached = [stage for stage in before.stages if stage.first_sample < cursor]
    if newest is None or not all(_has_stage(newest, stage) for stage in reached):
        return before
    return replace(before, sources=newest.sources, stages=newest.stages)


def _places(sources: Sequence[StreamSource], known: Sequence[StreamSource]) -> list[int]:
    """Return the index of each source among the known ones, matched by content, else by name. New sources follow."""
    by_content = {source.digest: place for place, source in enumerate(known) if source.digest}
    found = [by_content.get(source.digest) for source in sources]
    by_name = {source.name: place for place, source in enumerate(known) if place not in found}
    found = [by_name.get(source.name) if place is None else place for source, place in zip(sources, found, strict=True)]
    new = iter(range(len(known), len(known) + len(sources)))
    return [next(new) if place is None else place for place in found]


def _content_problem(known: StreamSource, source: StreamSource, accepted: Collection[str]) -> str:
    """Return why a source's samples are not the same as before; empty if they are, or if the change is accepted."""
    has_other_content = known.digest not in ("", source.digest)
    if known.num_tokens == source.num_tokens and (not has_other_content or source.digest in accepted):
        return ""
    accept = "; to use these data as another source: a [[data_source]] with another name"
    if known.num_tokens == source.num_tokens:
        accept += f"; to use them at the same cursor: data.accepted_digest={source.digest}"
    return (
        f"{known.name} had {_size_text(known)}, and {source.name} has {_size_text(source)}, so its consumed samples "
        f"are unknown{accept}"
    )


def _size_text(source: StreamSource) -> str:
    return f"{source.num_tokens} tokens" + (f" with digest {source.digest}" if source.digest else "")


def _placed(weights: Sequence[int], places: Sequence[int], length: int) -> tuple[int, ...]:
    """Return weights in the order of the known sources. Shapes: weights and places [sources of now]."""
    placed = [0] * length
    for place, weight in zip(places, weights, strict=True):
        placed[place] = weight
    return tuple(placed)


def _has_stage(stream: SampleStream, stage: MixtureStage) -> bool:
    return any(
        existing.first_sample == stage.first_sample and _is_same_mixture(existing, stage) for existing in stream.stages
    )


def _is_same_mixture(first: MixtureStage, second: MixtureStage) -> bool:
    """Compare lengths and proportions. A source that only one of the two has must have weight 0 there."""
    parts = [[weight // math.gcd(*stage.weights) for weight in stage.weights] for stage in (first, second)]
    return first.seq_len == second.seq_len and all(one == other for one, other in zip_longest(*parts, fillvalue=0))


def _stage_text(sources: Sequence[StreamSource], stage: MixtureStage) -> str:
    total = sum(stage.weights)
    # the stage has no weights for sources that were added later
    used = [(source.name, weight) for source, weight in zip(sources, stage.weights, strict=False) if weight]
    shares = ", ".join(f"{name} {100 * weight / total:.4g} %" for name, weight in used)
    return f"from sample {stage.first_sample} on, the mixture is {shares}, in samples of {stage.seq_len} tokens"
