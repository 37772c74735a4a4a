"""Rules of the sections [data], [data_source], [data_stage] and [validation_set]: keys of [data] that fit together, one
way to name data, distinct paths and names, a weight above 0 for some source, and for stages the names of existing
sources and distinct starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatrain.config.checks.context import Context
from megatrain.config.config import Config
from megatrain.config.data import MAX_WEIGHT, MIN_WEIGHT, DataConfig, DataSourceConfig
from megatrain.config.evaluation import ValidationSetConfig
from megatrain.config.options import options_of
from megatrain.config.picture_share import mixes_pictures
from megatrain.config.problem import Problem, closest_name, unset_problems
from megatrain.config.stages import DataStageConfig
from megatrain.config.tables import kind_of
from megatrain.config.toml_text import setting, value_text
from megatrain.formatting import alternatives

_Sections = Mapping[str, DataSourceConfig | ValidationSetConfig]


@dataclass(frozen=True, slots=True)
class _DataSections:
    """Sections that name data. `key`: the key of [data] that replaces them if there is only one set.

    `content` and `hint` are parts of messages: what the sections name, and how to resolve two that are the same.
    """

    name: str
    key: str
    content: str
    hint: str


_DATA_SECTIONS = (
    _DataSections("data_source", "train", "training data", "use one source with the sum of their weights"),
    _DataSections("validation_set", "validation", "held-out data", "remove one of them"),
)


def data_problems(context: Context) -> Iterator[Problem]:
    """Yield what is wrong with the training data and the held-out data as the configuration names them."""
    config = context.config
    if config.data.packing != "none" and not config.data.has_document_mask:
        yield Problem(
            ("data.packing", "data.has_document_mask"),
            f"data.packing={value_text(config.data.packing)} needs data.has_document_mask=true, so that attention does "
            'not cross documents; set it, or data.packing="none"',
        )
    if config.data.bad_samples == "replace" and config.fp8.is_used and config.fp8.scaling == "delayed":
        yield Problem(
            ("data.bad_samples", "fp8.scaling"),
            f"data.bad_samples={value_text(config.data.bad_samples)} replaces bad samples by samples without labels, "
            'whose magnitudes would change the scales of fp8.scaling="delayed"; use scaling="current", or '
            'data.bad_samples="refuse"',
        )
    if config.data.balance == "cost" and not config.data.has_document_mask and not mixes_pictures(config):
        yield Problem(
            ("data.balance", "data.has_document_mask"),
            f"data.balance={value_text(config.data.balance)} needs data.has_document_mask=true, or sources with and "
            'without pictures: otherwise all samples cost the same; set it, or data.balance="none" or "file"',
        )
    if config.data.balance != "none" and config.data.packing != "none" and config.data.bad_samples == "replace":
        yield Problem(
            ("data.balance", "data.packing", "data.bad_samples"),
            f"data.balance={value_text(config.data.balance)} needs the lengths of the documents of every sample, and "
            'a damaged page of packed samples has none; use data.bad_samples="refuse", or data.balance="none"',
        )
    yield from _cache_problems(config.data)
    for named in _DATA_SECTIONS:
        sections = config.sections_of(named.name)
        with_path = {name: source for name, source in sections.items() if source.path}
        for section, source in sections.items():
            if not source.is_set:
                yield from unset_problems(section, source, "path")
        yield from _two_forms(config, named, with_path)
        yield from _names_of_paths(with_path)
        yield from _same_data(named, {name: source for name, source in sections.items() if source.is_set})
    # a source with a wrong path or name is missing here, or has another name
    are_sources_known = not any(_names_source(key) for key in context.doubtful)
    yield from _weight_problems(config.sections_of("data_source"), are_all_known=are_sources_known)
    yield from _stage_problems(context, are_names_known=are_sources_known)


def _cache_problems(data: DataConfig) -> Iterator[Problem]:
    # the blocks that are read ahead may fill half of the cache, so that they do not remove each other
    least = 2 * data.cache_block_bytes * (data.readahead_blocks + 1)
    if data.cache_bytes < least:
        yield Problem(
            ("data.cache_bytes", "data.cache_block_bytes", "data.readahead_blocks"),
            f"data.cache_bytes={data.cache_bytes} must be at least 2 * data.cache_block_bytes * (data.readahead_blocks "
            f"+ 1) = {least}; use a larger cache, smaller blocks or fewer of them",
        )


def _names_source(key: str) -> bool:
    section, _, name = key.partition(".")
    return bool(kind_of(section, ("data_source",))) and name in ("path", "pictures", "name")


def _two_forms(config: Config, named: _DataSections, with_path: _Sections) -> Iterator[Problem]:
    value = getattr(config.data, named.key)
    if value and with_path:
        section = next(iter(with_path))
        key, other = f"{section}.path", f"data.{named.key}"
        yield Problem(
            (key, other),
            f"{setting(key, with_path[section].path)} and {other}={value_text(value)} both name "
            f'{named.content}; add a [[{named.name}]] for {other}, or use {other}=""',
        )


def _names_of_paths(with_path: Mapping[str, Any]) -> Iterator[Problem]:
    for section, source in with_path.items():
        if not source.name and options_of(source.__class__)["name"].violation(source.path):
            key = f"{section}.path"
            yield Problem(
                (key, f"{section}.name"),
                f"{setting(key, source.path)} is also the name, and a name must not contain a comma or a line break; "
                f"set {section}.name",
            )


def _same_data(named: _DataSections, sections: _Sections) -> Iterator[Problem]:
    for name in ("path", "name"):
        seen: dict[str, str] = {}
        for section, source in sections.items():
            value = source.resolved_name if name == "name" else source.path
            first = seen.setdefault(value, section) if value else section
            # two sections with the same path have the same name, too, unless they set one
            if first != section and (name == "path" or source.path != sections[first].path):
                key = f"{section}.{name}"
                yield Problem(
                    (key, f"{first}.{name}"),
                    f"{setting(key, value)} is also used by [{first}]; {named.hint}, or use another {name}",
                )


def _weight_problems(sections: Mapping[str, DataSourceConfig], *, are_all_known: bool) -> Iterator[Problem]:
    for section, source in sections.items():
        if 0.0 < source.weight < MIN_WEIGHT:
            yield Problem(
                (f"{section}.weight",),
                f"{section}.weight={source.weight} is above 0 and below {MIN_WEIGHT}; use 0, or greater weights for "
                "all sources",
            )
    found = {name: source for name, source in sections.items() if source.is_set}
    if are_all_known and found and not any(source.weight for source in found.values()):
        yield Problem(
            tuple(f"{section}.weight" for section in found),
            f"{next(iter(found))}.weight=0.0, and no other source has a weight; give one a weight above 0",
        )


def _stage_problems(context: Context, *, are_names_known: bool) -> Iterator[Problem]:
    """Yield what is wrong with the starts and the weights of later stages. checks/batch.py checks their batch sizes,
    checks/lengths.py their lengths.

    are_names_known: the names of all sources are known.
    """
    config = context.config
    names = [source.resolved_name for source in config.sections_of("data_source").values() if source.is_set]
    starts: dict[int, str] = {}
    # the ramp-up, which may be wrong, does not matter here: it could move only stages that change the sample length,
    # and such a stage is refused during the ramp-up
    placed = replace(config, batch=config.batch.without_rampup).placed_stages
    for section, stage in config.sections_of("data_stage").items():
        names_of_stage = ("after_tokens", "weights", "global_batch_size", "seq_len")
        begin, key, size, length = (f"{section}.{name}" for name in names_of_stage)
        if not stage.has_effect:
            if stage.after_tokens:
                text = f"{begin}={stage.after_tokens} does nothing without {key}, {size} or {length}"
                yield Problem((begin, key, size, length), f"{text}; set one, or remove it")
            continue
        problem = _weights_problem(stage, names) if are_names_known and stage.weights else ""
        if problem:
            yield Problem((key, "data_source.path"), f"{setting(key, stage.weights)}{problem}")
        own = next(one for one in placed if one.stage is stage)
        first = starts.setdefault(own.first_sample, section)
        if not stage.after_tokens:
            text = f"{begin}=0 is the beginning of the run, for which data_source.weight, batch.global_batch_size and"
            yield Problem((begin, key, size, length), f"{text} data.seq_len apply; set these, or a number above 0")
        elif first != section and context.are_known("model.seq_len", "data.seq_len", "batch.global_batch_size"):
            yield Problem(
                (begin, f"{first}.after_tokens"),
                f"{begin}={stage.after_tokens} begins in the same sample as [{first}] (samples have "
                f"{config.seq_len} tokens at first, and a stage with another length begins with a step); remove one of "
                "them, or let it begin later",
            )


def _weights_problem(stage: DataStageConfig, names: Sequence[str]) -> str:
    """Return what is wrong with the weights of a stage, as the end of a sentence; empty if nothing is."""
    if not names:
        return " needs sources with names, and there is no [[data_source]]; add them, or remove the stage"
    try:
        weight_of = stage.weight_of
    except ValueError as error:
        return (
            f": {value_text(str(error))} must be NAME=WEIGHT, each name once, and the weight 0 or from "
            f"{MIN_WEIGHT:g} to {MAX_WEIGHT:,}"
        )
    unknown = next((name for name in weight_of if name not in names), None)
    if unknown is not None:
        close = closest_name(unknown, names)
        hint = f"did you mean {value_text(close)}?" if close else f"the sources are {alternatives(tuple(names))}"
        return f": there is no source {value_text(unknown)}; {hint}"
    return "" if any(weight_of.values()) else " has no weight above 0; give a source one"
