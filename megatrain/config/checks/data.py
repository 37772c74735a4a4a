"""Rules of the sections [data] and [data_source]: one way to name training data, distinct sources, a weight above 0."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.config.checks.context import Context
from megatrain.config.config import Config
from megatrain.config.data import LEAST_WEIGHT, DataSourceConfig
from megatrain.config.problem import Problem, unset_problems
from megatrain.config.toml_text import setting, value_text


def data_problems(context: Context) -> Iterator[Problem]:
    """Yield what is wrong with the training data as the configuration names them."""
    config = context.config
    sections = config.sections_of("data_source")
    with_path = {name: source for name, source in sections.items() if source.path}
    for section, source in sections.items():
        if section not in with_path:
            yield from unset_problems(section, source, "path")
        if 0.0 < source.weight < LEAST_WEIGHT:
            yield Problem(
                (f"{section}.weight",),
                f"{section}.weight={source.weight} is above 0 and below {LEAST_WEIGHT}; use 0, or greater weights for "
                "all sources",
            )
    yield from _two_forms(config, with_path)
    yield from _same_sources(with_path)
    if with_path and not any(source.weight for source in with_path.values()):
        yield Problem(
            tuple(f"{section}.weight" for section in with_path),
            f"{next(iter(with_path))}.weight=0.0, and no other source has a weight; give one a weight above 0",
        )


def _two_forms(config: Config, with_path: dict[str, DataSourceConfig]) -> Iterator[Problem]:
    if config.data.train and with_path:
        section = next(iter(with_path))
        key = f"{section}.path"
        yield Problem(
            (key, "data.train"),
            f"{setting(key, with_path[section].path)} and data.train={value_text(config.data.train)} both name "
            'training data; add a [[data_source]] for data.train, or use data.train=""',
        )


def _same_sources(with_path: dict[str, DataSourceConfig]) -> Iterator[Problem]:
    for name in ("path", "name"):
        seen: dict[str, str] = {}
        for section, source in with_path.items():
            value = source.resolved_name if name == "name" else source.path
            first = seen.setdefault(value, section)
            if first != section:
                key = f"{section}.{name}"
                yield Problem(
                    (key, f"{first}.{name}"),
                    f"{setting(key, value)} is that of [{first}], too; use one source with the sum of their weights, "
                    f"or another {name}",
                )
