"""Metrics of the producers of pictures that a host asks; see `exposition` for the rules of names and labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest

from prometheus_client.core import Metric

from megatrain_diagnostics.metrics.families import gauge
from megatrain_diagnostics.metrics.readings import MAX_PRODUCERS, ProducerReading, RankReading

_GAUGES: tuple[tuple[str, str, Callable[[Sequence[ProducerReading]], float]], ...] = (
    ("megatrain_producer_pictures",
     "Pictures that a producer answered for reads of the host that ended in the last step.",
     lambda found: sum(one.num_pictures for one in found)),
    ("megatrain_producer_answer_seconds", "Mean time of an answered request; the longest of the host's replicas.",
     lambda found: max(one.answer_s for one in found)),
    ("megatrain_producer_requests_waiting",
     "The most requests that waited in the producer when a request of the host arrived.",
     lambda found: max(one.num_waiting for one in found)),
    ("megatrain_producer_failed_requests", "Requests in the last step that had to be sent again.",
     lambda found: sum(one.num_failed for one in found)),
)  # fmt: skip
"""Name, text, and the value of a producer from its readings by the ranks of the host."""


def producer_metrics(ranks: Sequence[RankReading], labels: Mapping[str, str]) -> Iterator[Metric]:
    """Yield the gauges of the producers of pictures that the ranks of a host ask, by their numbers."""
    of_ranks = list(zip_longest(*(rank.producers for rank in ranks)))[:MAX_PRODUCERS]
    read = [[one for one in found if one is not None] for found in of_ranks]
    for name, text, value in _GAUGES if read else ():
        samples = [((str(number),), value(found)) for number, found in enumerate(read)]
        yield gauge(name, text, labels, samples, ["producer"])
