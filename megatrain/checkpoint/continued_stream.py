"""The sample order of a job that resumes: each source goes on where it was, and a new mixture begins at the cursor.

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
    place with weight 0, so that they go on from there if they come back.
    """
    if before.seed != now.seed:
        return ContinuedStream(
            now, problem=f"its samples were drawn with seed {before.seed}, and data.seed is {now.seed}"
        )
    sources, notes = list(before.sources), []
    places = _places(now.sources, before.sources)
    for source, place in zip(now.sources, places, strict=True):
        if place == len(sources):
            sources.append(source)
            continue
        known = sources[place]
        problem = _content_problem(known, source, accepted)
        if problem:
            return ContinuedStream(now, problem=problem)
        if known.digest and source.digest != known.digest:
            notes.append(
                f"{source.name} has other content (digest {source.digest}), which data.accepted_digest accepts"
            )
        elif not known.digest and source.digest:
            notes.append(
                f"the checkpoint has no digest of {source.name}, so it is not known whether its content has changed"
            )
        sources[place] = source
    weights = [0] * len(sources)
    for place, weight in zip(places, now.stages[-1].weights, strict=True):
        weights[place] = weight
    stages = before.stages
    if _in_lowest_terms(stages[-1].weights, len(sources)) != _in_lowest_terms(weights, len(sources)):
        stages = (*(one for one in stages if one.first_sample < cursor), MixtureStage(cursor, tuple(weights)))
        notes.append(f"from sample {cursor} on, the mixture is {_mixture_text(sources, weights)}")
    stream = replace(now, sources=tuple(sources), stages=stages, skipped=before.skipped)
    return ContinuedStream(stream, tuple(notes))


def with_later_stages(before: SampleStream, newest: SampleStream | None) -> SampleStream:
    """Return a stream with the stages that the `newest` checkpoint knows, for a job that goes back.

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
    accept = ""
    if known.num_tokens == source.num_tokens:
        accept = f"; to use these data at the same cursor: data.accepted_digest={source.digest}"
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
