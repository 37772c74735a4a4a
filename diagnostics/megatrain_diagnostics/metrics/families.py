"""Families of metrics, made from samples. An unknown value (None) has no sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Samples = Iterable[tuple[Sequence[str], float | None]]
"""The values of the labels in which the samples differ, and the value of each sample."""


def gauge(name: str, text: str, labels: Mapping[str, str], samples: Samples, by: Sequence[str] = ()) -> Metric:
    """Return a gauge. `labels`: name -> value of the labels of all samples; `by`: names of the others."""
    return _filled(GaugeMetricFamily(name, text, labels=[*labels, *by]), labels, samples)


def counter(name: str, text: str, labels: Mapping[str, str], samples: Samples, by: Sequence[str] = ()) -> Metric:
    """Return a counter, as `gauge` does."""
    return _filled(CounterMetricFamily(name, text, labels=[*labels, *by]), labels, samples)


def counts(name: str, text: str, labels: Mapping[str, str], by: str, values: Mapping[str, int]) -> Metric:
    """Return a counter with one sample for each key of `values`, which is the value of the label `by`."""
    return counter(name, text, labels, [((key,), value) for key, value in sorted(values.items())], [by])


def single_gauges(labels: Mapping[str, str], rows: Iterable[tuple[str, str, float | None]]) -> Iterator[Metric]:
    """Yield a gauge with one sample for each (name, text, value) whose value is known."""
    for name, text, value in rows:
        if value is not None:
            yield gauge(name, text, labels, [((), value)])


def _filled(family: Any, labels: Mapping[str, str], samples: Samples) -> Metric:
    for where, value in samples:
        if value is not None:
            family.add_metric([*labels.values(), *where], float(value))
    found: Metric = family
    return found
