"""Metrics of the producers of pictures that a host asks; see `exposition` for the rules of names and labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from prometheus_client.core import GaugeMetricFamily, Metric

from megatrain_diagnostics.metrics.readings import MAX_PRODUCERS, ProducerReading, RankReading


@dataclass(frozen=True, slots=True)
class _Gauge:
    """A gauge of a producer of pictures. `of_ranks`: from its readings by the ranks of the host."""

    name: str
    text: str
    of_ranks: Callable[[Sequence[ProducerReading]], float]


_GAUGES = (
    _Gauge(
        "megatrain_producer_pictures",
        "Pictures that a producer answered for reads of the host that ended in the last step.",
        lambda found: sum(one.num_pictures for one in found),
    ),
    _Gauge(
        "megatrain_producer_answer_seconds",
        "Mean time of an answered request; the longest of the host's replicas.",
        lambda found: max(one.answer_s for one in found),
    ),
    _Gauge(
        "megatrain_producer_requests_waiting",
        "The most requests that waited in the producer when one of the host arrived.",
        lambda found: max(one.num_waiting for one in found),
    ),
    _Gauge(
        "megatrain_producer_failed_requests",
        "Requests in the last step that had to be sent again.",
        lambda found: sum(one.num_failed for one in found),
    ),
)


def producer_metrics(ranks: Sequence[RankReading], labels: dict[str, str]) -> Iterator[Metric]:
    """Yield the gauges of the producers of pictures that the ranks of a host ask, by their numbers."""
    of_ranks = list(zip_longest(*(rank.producers for rank in ranks)))
    for gauge in _GAUGES if of_ranks else ():
        family = GaugeMetricFamily(gauge.name, gauge.text, labels=[*labels, "producer"])
        for number, found in enumerate(of_ranks[:MAX_PRODUCERS]):
            family.add_metric(
                [*labels.values(), str(number)], gauge.of_ranks([one for one in found if one is not None])
            )
        yield family
