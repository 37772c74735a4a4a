"""The data waits of an invented host, and its data loader, as the page gets them."""

from __future__ import annotations

from megatrain_dashboard.api.host_data.document import (
    DataCacheDocument,
    DataLoaderDocument,
    HostDataDocument,
    PicturesDocument,
    ProducerDocument,
    RankDataDocument,
    ReplacedSampleDocument,
)

_NUM_POINTS = 60


def host_data(host: str, first_rank: int, num_ranks: int, last_step: int, *, is_slow: bool) -> HostDataDocument:
    """Return 240 steps of a host; `is_slow`: its loader was restarted once, and ranks waited for it."""
    wait_s = 0.35 if is_slow else 0.0004

    def rank_data(rank: int) -> RankDataDocument:
        return RankDataDocument(
            rank=rank, wait_s=wait_s, longest_wait_s=8 * wait_s, longest_wait_step=last_step - 100,
            num_not_ready=31 if is_slow else 0,
            wait_history=tuple(wait_s * (1 + number % 8) for number in range(_NUM_POINTS)),
        )  # fmt: skip

    loader = DataLoaderDocument(
        replicas=(first_rank // num_ranks,), num_bytes=12_582_912.0, read_s=0.9 if is_slow else 0.05,
        longest_read_s=4.5 if is_slow else 0.2, num_ready=1 if is_slow else 2, least_ready=0 if is_slow else 1,
        most_ready=2, num_starts=2 if is_slow else 1,
        ready_history=tuple(float(number % 2 + (not is_slow)) for number in range(_NUM_POINTS)),
    )  # fmt: skip
    pictures = PicturesDocument(
        wait_s=0.8, longest_wait_s=4.4,
        producers=(
            ProducerDocument(
                number=0, address="10.0.3.7:7300", state="answers", pictures_per_s=142.5, answer_s=0.21, num_waiting=14,
                num_failed=0, pictures_history=tuple(480.0 + number % 5 for number in range(_NUM_POINTS)),
            ),
            ProducerDocument(
                number=1, address="10.0.3.8:7300", state="failed", pictures_per_s=12.25, answer_s=None, num_waiting=0,
                num_failed=37, pictures_history=tuple(480.0 if number < 5 else 0.0 for number in range(_NUM_POINTS)),
            ),
        ),
    )  # fmt: skip
    replaced = ReplacedSampleDocument(
        rank=first_rank,
        at_unix_s=1_790_000_000.0,
        text=(
            "sample 81302 is replaced by one without labels: /data/cc12m/00017.tar: 000170045.jpg (sample 170045): its "
            "file is cut off"
        ),
    )
    cache = DataCacheDocument(
        hit_bytes=11_534_336.0,
        fetched_bytes=50_331_648.0 if is_slow else 1_048_576.0,
        evicted_bytes=1_048_576.0,
        num_not_stored=12 if is_slow else 0,
    )
    return HostDataDocument(
        host=host, first_step=last_step - 239, last_step=last_step, step_s=3.2, loader=loader,
        pictures=pictures if is_slow else None, replaced_samples=(replaced,) if is_slow else (), cache=cache,
        ranks=tuple(rank_data(first_rank + number) for number in range(num_ranks)),
    )  # fmt: skip
