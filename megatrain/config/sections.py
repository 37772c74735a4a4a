"""The sections of a configuration, with their keys, and a configuration as nested tables.

A configuration may have several sections of the kinds in NUMBERED.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self, get_type_hints

from megatrain.config.batch import BatchConfig
from megatrain.config.checkpoint import CheckpointConfig
from megatrain.config.dashboard import DashboardConfig
from megatrain.config.data import DataConfig, DataSourceConfig
from megatrain.config.diagnostics import DiagnosticsConfig
from megatrain.config.evaluation import EvaluationConfig, ValidationSetConfig
from megatrain.config.fp8 import Fp8Config
from megatrain.config.job import JobConfig
from megatrain.config.kernels import KernelsConfig
from megatrain.config.model import ModelConfig
from megatrain.config.notify import (
    SWITCHES,
    AlertmanagerConfig,
    EmailConfig,
    NotifyConfig,
    PagerDutyConfig,
    ReceiverConfig,
    SlackConfig,
    WebhookConfig,
)
from megatrain.config.optimizer import OptimizerConfig, ParameterGroupConfig
from megatrain.config.options import Option, Value, options_of
from megatrain.config.parallel import ParallelConfig
from megatrain.config.picture_files import PicturesConfig
from megatrain.config.recording import LogConfig, ProfileConfig, TelemetryConfig
from megatrain.config.recovery import RecoveryConfig
from megatrain.config.runtime import RuntimeConfig
from megatrain.config.stages import DataStageConfig
from megatrain.config.tables import TableReader, kind_of, number_of
from megatrain.config.train import TrainConfig
from megatrain.contracts.errors import ConfigError

NUMBERED = (*SWITCHES, "parameter_group", "data_source", "data_stage", "validation_set")
"""The kinds of sections that a configuration may have several of."""
_FURTHER = "further_sections"
_DataSection = DataSourceConfig | DataStageConfig | ValidationSetConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Sections:
    """The values of all keys of a configuration, by section."""

    job: JobConfig = field(default_factory=JobConfig)
    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    batch: BatchConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    parameter_group: ParameterGroupConfig = field(default_factory=ParameterGroupConfig)
    data: DataConfig = field(default_factory=DataConfig)
    pictures: PicturesConfig = field(default_factory=PicturesConfig)
    data_source: DataSourceConfig = field(default_factory=DataSourceConfig)
    data_stage: DataStageConfig = field(default_factory=DataStageConfig)
    validation_set: ValidationSetConfig = field(default_factory=ValidationSetConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    log: LogConfig = field(default_factory=LogConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    fp8: Fp8Config = field(default_factory=Fp8Config)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    diagnostics: DiagnosticsConfig = field(default_factory=DiagnosticsConfig)
    dashboard: DashboardConfig = field(default_factory=DashboardConfig)
    notify: NotifyConfig = field(default_factory=NotifyConfig)
    slack: SlackConfig = field(default_factory=SlackConfig)
    pagerduty: PagerDutyConfig = field(default_factory=PagerDutyConfig)
    email: EmailConfig = field(default_factory=EmailConfig)
    alertmanager: AlertmanagerConfig = field(default_factory=AlertmanagerConfig)
    webhook: WebhookConfig = field(default_factory=WebhookConfig)
    further_sections: tuple[tuple[str, ReceiverConfig | ParameterGroupConfig | _DataSection], ...] = ()
    """The second and later sections of each kind, with their names, such as `slack-2`."""

    @property
    def sections(self) -> Mapping[str, Any]:
        """The sections by name: first those that have an attribute here, in order, then `further_sections`."""
        return {name: getattr(self, name) for name in all_options()} | dict(self.further_sections)

    def sections_of(self, kind: str) -> Mapping[str, Any]:
        """Return the sections of a kind in NUMBERED by name, in the order of their numbers."""
        sections = self.sections
        names = sorted((name for name in sections if kind_of(name, (kind,))), key=_numbered_order)
        return {name: sections[name] for name in names}

    @property
    def receivers(self) -> tuple[str, ...]:
        """The sections of the receivers of notifications that are switched on, sorted by kind and number."""
        sections = self.sections
        names = sorted((name for name in sections if receiver_kind(name)), key=_numbered_order)
        return tuple(
            name for name in names if any(getattr(sections[name], key) for key in SWITCHES[receiver_kind(name)])
        )

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return section -> key -> value, with values that JSON can represent."""
        return {
            section: {name: _json_value(getattr(values, name)) for name in options_of(values.__class__)}
            for section, values in self.sections.items()
        }

    @classmethod
    def from_dict(cls, tables: Mapping[str, object]) -> Self:
        """Return the configuration that `to_dict` described; missing keys take their defaults.

        Raises: ConfigError for unknown keys, missing keys and wrong types. Ranges and rules between keys are left to
        `check`.
        """
        reader = TableReader(options_with(tables))
        reader.read(tables, origins={})
        reader.require_all(origins={}, fallback=None)
        if reader.problems:
            raise ConfigError(reader.problems)
        return cls.of_values(reader.values)

    @classmethod
    def of_values(cls, values: Mapping[str, Mapping[str, Value]]) -> Self:
        """Return a configuration of values that already have the right types.

        A required key without a value gets a placeholder; the caller reports it as missing.
        """
        sections = {}
        classes = section_classes()
        for name, section in classes.items():
            required = {
                option.name: option.placeholder for option in options_of(section).values() if option.is_required
            }
            sections[name] = section(**required | dict(values.get(name, {})))
        further = sorted((name for name in values if name not in classes and _numbered_kind(name)), key=_numbered_order)
        numbered = tuple((name, classes[_numbered_kind(name)](**values[name])) for name in further)
        return cls(**sections, further_sections=numbered)


@cache
def all_options() -> Mapping[str, Mapping[str, Option]]:
    """Return the keys of every section, in the order of `Sections`."""
    return {name: options_of(section) for name, section in section_classes().items()}


def options_with(names: Iterable[str]) -> Mapping[str, Mapping[str, Option]]:
    """Return the keys of every section, and of the sections such as `slack-2` among `names`."""
    options = all_options()
    further = {name: options[_numbered_kind(name)] for name in names if name not in options and _numbered_kind(name)}
    return {**options, **{name: further[name] for name in sorted(further, key=_numbered_order)}}


def receiver_kind(section: str) -> str:
    """Return the kind of a receiver's section; empty for other sections."""
    return kind_of(section, SWITCHES)


def _numbered_kind(section: str) -> str:
    return kind_of(section, NUMBERED)


def _numbered_order(section: str) -> tuple[int, int]:
    kind = _numbered_kind(section)
    return NUMBERED.index(kind), number_of(section, kind)


def section_classes() -> Mapping[str, Any]:
    """Return the class of every section, in the order of `Sections`."""
    return {name: section for name, section in get_type_hints(Sections).items() if name != _FURTHER}


def _json_value(value: Value) -> int | float | str | list[int]:
    return list(value) if isinstance(value, tuple) else value
