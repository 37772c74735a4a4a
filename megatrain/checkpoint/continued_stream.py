"""The sample order of a job that resumes: each source continues where it was, and a new mixture begins at the cursor.

Sources are recognised by the digest of their content, else by name. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from megatrain.checkpoint_format.sample_stream import MixtureStage, SampleStream, StreamSource


@dataclass(frozen=True, slots=True)
class ContinuedStream:
    """The stream from here on, and messages for the log. `problem`: why the cursor means nothing in it, else empty."""

    stream: SampleStream
    notes: tuple[str, ...] = ()
    problem: str = ""


def continued_stream(
    before: SampleStream, now: SampleStream, cursor: int, accepted: Collection[str] = ()
) -> ContinuedStream:
    """Return the stream of a job that resumes at sample `cursor` of `before` with the sources of `now`.

    accepted: digests of content that a source may have now instead of what it had. Sources that are gone keep their
    place with weight 0, so that they go on from there if they come back. A new mixture begins at the cursor, or behind
    the last sample that `before` skips: the numbers of skipped samples have their meaning in the mixture of before.
    """
    if not before.sources:
        return ContinuedStream(now, problem="no training took place in it")
    if before.seed != now.seed:
        return ContinuedStream(
            now, problem=f"its samples were drawn with seed {before.seed}, and data.seed is {now.seed}"
        )
    places = _places(now.sources, before.sources)
    sources, notes, problem = _recognised(before.sources, now.sources, places, accepted)
    if problem:
        return ContinuedStream(now, problem=problem)
    weights = [0] * len(sources)
    for place, weight in zip(places, now.stages[-1].weights, strict=True):
        weights[place] = weight
    begin = max((end for _, end in before.skipped if end > cursor), default=cursor)
    # stages behind `begin` were never reached; the job went back
    stages = tuple(stage for stage in before.stages if stage.first_sample < max(begin, 1))
    if _in_lowest_terms(stages[-1].weights, len(sources)) != _in_lowest_terms(weights, len(sources)):
        stages = (*(stage for stage in stages if stage.first_sample < begin), MixtureStage(begin, tuple(weights)))
    if stages[-1].first_sample > cursor or stages[-1] not in before.stages:
        notes.append(f"from sample {stages[-1].first_sample} on, the mixture is {_mixture_text(sources, weights)}")
    problem = _missing_problem(sources, stages, places, cursor)
    if problem:
        return ContinuedStream(now, problem=problem)
    stream = replace(now, sources=tuple(sources), stages=stages, skipped=before.skipped)
    return ContinuedStream(stream, tuple(notes))


def _recognised(
    known: Sequence[StreamSource], sources: Sequence[StreamSource], places: Sequence[int], accepted: Collection[str]
) -> tuple[list[StreamSource], list[str], str]:
    """Return all sources in the order of their places, notes for the log, and why the content of one changed."""
    found, notes = list(known), []
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


def _missing_problem(
    sources: Sequence[StreamSource], stages: Sequence[MixtureStage], places: Collection[int], cursor: int
) -> str:
    """Return why samples from the cursor on cannot be read: their source is gone. Empty if all can."""
    ends = [*(stage.first_sample for stage in stages[1:]), None]
    for stage, end in zip(stages, ends, strict=True):
        missing = [place for place, weight in enumerate(stage.weights) if weight and place not in places]
        if missing and (end is None or end > cursor):
            name = sources[missing[0]].name
            until = "" if end is None else f", until sample {end}"
            return (
                f"its samples from {max(cursor, stage.first_sample)} on come from {name}, too{until}, and no source of "
                "the configuration has these tokens; name it again with weight=0"
            )
    return ""


def with_later_stages(before: SampleStream, newest: SampleStream | None) -> SampleStream:
    """Return a stream with the stages of the `newest` one that is known, for a job that goes back.

    So the numbers of the samples that it is to skip mean the same samples as before.
    """
    if newest is None or newest.stages[: len(before.stages)] != before.stages:
        return before
    return replace(before, sources=newest.sources, stages=newest.stages)


def _places(sources: Sequence[StreamSource], known: Sequence[StreamSource]) -> list[int]:
    """Return the place of each source among the known ones; new ones follow after them. Content decides before name."""
    by_content = {one.digest: place for place, one in enumerate(known) if one.digest}
    found = [by_content.get(source.digest) for source in sources]
    by_name = {one.name: place for place, one in enumerate(known) if place not in found}
    found = [by_name.get(source.name) if place is None else place for source, place in zip(sources, found, strict=True)]
    new = iter(range(len(known), len(known) + len(sources)))
    return [next(new) if place is None else place for place in found]


def _content_problem(known: StreamSource, source: StreamSource, accepted: Collection[str]) -> str:
    """Return why a source's samples are not those of before; empty if they are, or if that is accepted."""
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


def _in_lowest_terms(weights: Collection[int], length: int) -> list[int]:
    divisor = math.gcd(*weights)
    return [*(weight // divisor for weight in weights), *[0] * (length - len(weights))]


def _mixture_text(sources: list[StreamSource], weights: list[int]) -> str:
    total = sum(weights)
    used = [(source.name, weight) for source, weight in zip(sources, weights, strict=True) if weight]
    return ", ".join(f"{name} {100 * weight / total:.4g} %" for name, weight in used)
