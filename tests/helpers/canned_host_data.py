"""The data waits of an invented host, and its data loader, as the page gets them."""

from __future__ import annotations

from megatrain_dashboard.api.host_data import (
    DataCacheDocument,
    DataLoaderDocument,
    HostDataDocument,
    RankDataDocument,
)

_NUM_POINTS = 60


def host_data(host: str, first_rank: int, num_ranks: int, last_step: int, *, is_slow: bool) -> HostDataDocument:
    """Return 240 steps of a host; `is_slow`: its loader was restarted once, and ranks waited for it."""
    wait_s = 0.35 if is_slow else 0.0004

    def rank_data(rank: int) -> RankDataDocument:
        return RankDataDocument(
            rank=rank,
            wait_s=wait_s,
            longest_wait_s=8 * wait_s,
            longest_wait_step=last_step - 100,
            num_not_ready=31 if is_slow else 0,
            wait_history=tuple(wait_s * (1 + number % 8) for number in range(_NUM_POINTS)),
        )

    loader = DataLoaderDocument(
        replicas=(first_rank // num_ranks,),
        num_bytes=12_582_912.0,
        read_s=0.9 if is_slow else 0.05,
        longest_read_s=4.5 if is_slow else 0.2,
        num_ready=1 if is_slow else 2,
        least_ready=0 if is_slow else 1,
        most_ready=2,
        num_starts=2 if is_slow else 1,
        ready_history=tuple(float(number % 2 + (not is_slow)) for number in range(_NUM_POINTS)),
    )
    cache = DataCacheDocument(
        hit_bytes=11_534_336.0,
        fetched_bytes=50_331_648.0 if is_slow else 1_048_576.0,
        evicted_bytes=1_048_576.0,
        num_not_stored=12 if is_slow else 0,
    )
    return HostDataDocument(
        host=host,
        first_step=last_step - 239,
        last_step=last_step,
        step_s=3.2,
        loader=loader,
        cache=cache,
        ranks=tuple(rank_data(first_rank + number) for number in range(num_ranks)),
    )
