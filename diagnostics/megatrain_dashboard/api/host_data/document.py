"""The documents about the data of a host. Histories are the oldest first."""

from __future__ import annotations

from typing import Literal

from megatrain_dashboard.responses.document import Document

ProducerState = Literal["answers", "failed", "not-asked"]


class RankDataDocument(Document):
    """The time that a rank waited for its batches. Each entry of its history is the greatest wait of several steps."""

    rank: int
    wait_s: float | None
    """Mean of a step."""
    longest_wait_s: float | None
    longest_wait_step: int | None
    num_not_ready: int | None
    """Steps that the host's data loader did not have ready; null without a loader."""
    wait_history: tuple[float | None, ...]


class DataLoaderDocument(Document):
    """The work of a host's data loader (data.loader="host")."""

    replicas: tuple[int, ...]
    """The data-parallel replicas whose samples it reads."""
    num_bytes: float | None
    """Mean bytes of a step in the ring, for all replicas."""
    read_s: float | None
    """Mean time of its reads in a step."""
    longest_read_s: float | None
    """The most in one step."""
    num_ready: int | None
    """Steps in the ring when the ranks requested the last step: the fewest of any rank."""
    least_ready: int | None
    """The fewest in any of the steps."""
    most_ready: int | None
    """The most that the ring can have: data.prefetch; null if the configuration is not known."""
    num_starts: int | None
    """The number of its starts in the round; above 1: it was restarted."""
    ready_history: tuple[float | None, ...]
    """The fewest steps that were ready for any rank."""


class DataCacheDocument(Document):
    """The cache of a host for data in object storage: sums over the processes of the host that read data."""

    hit_bytes: float | None
    """Mean bytes that the reads of a step got from the cache; null if only one step is stored."""
    fetched_bytes: float | None
    """Mean bytes of a step that came from the object storage."""
    evicted_bytes: float | None
    """Mean bytes of a step that were removed from the cache to make room."""
    num_not_stored: int
    """Blocks and files that could not be written to the cache since the data were opened in the round."""


class ProducerDocument(Document):
    """What a producer of pictures did for the reads of a host."""

    number: int
    address: str
    """Empty: the producer runs on the host itself, or the configuration is not known."""
    state: ProducerState
    """In the last step whose reads asked any producer. failed: no request of this producer was answered."""
    pictures_per_s: float | None
    """Mean; null if the durations of the steps are not known."""
    answer_s: float | None
    """Mean time of an answered request, from connecting to the last picture; null without one."""
    num_waiting: int
    """The most requests, of all hosts, that waited in the producer when a request of this host arrived."""
    num_failed: int
    """Requests without an answer that could be used; they were sent again, to any producer."""
    pictures_history: tuple[float | None, ...]
    """Pictures in a step: the mean of a few steps."""


class PicturesDocument(Document):
    """The producers of pictures that the reads of a host ask."""

    wait_s: float
    """Mean time of a step in which reads waited for producers, for all replicas of the host."""
    longest_wait_s: float
    """The most in one step."""
    producers: tuple[ProducerDocument, ...]
    """By their numbers."""


class ReplacedSampleDocument(Document):
    """A sample that cannot be used and was replaced by one without labels."""

    rank: int
    at_unix_s: float
    text: str
    """The sample and its address: for a picture, the shard and the member."""


class HostDataDocument(Document):
    """The response of /hosts/{host}/data, for at most 240 steps of the newest round; empty if nothing is stored."""

    host: str
    first_step: int | None
    last_step: int | None
    step_s: float | None
    """Mean duration of these steps, without the wait for data."""
    loader: DataLoaderDocument | None
    """Null: each rank reads its own samples, or nothing of a loader was recorded."""
    cache: DataCacheDocument | None
    """Null: no data of the host's ranks are in object storage."""
    pictures: PicturesDocument | None
    """Null: no producer of pictures was asked."""
    replaced_samples: tuple[ReplacedSampleDocument, ...]
    """The newest first, at most 20."""
    ranks: tuple[RankDataDocument, ...]


def nothing_recorded(host: str) -> HostDataDocument:
    """Return the document of a host whose ranks have reported no step."""
    return HostDataDocument(
        host=host,
        first_step=None,
        last_step=None,
        step_s=None,
        loader=None,
        cache=None,
        pictures=None,
        replaced_samples=(),
        ranks=(),
    )
