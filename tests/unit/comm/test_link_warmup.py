"""The order of first messages: every link once, both ends agree, and there is no deadlock."""

from __future__ import annotations

import pytest

from megatrain.comm.link_warmup import warm_up_order

TARGETS = {"forward_to_next": 1, "backward_to_previous": -1}
SOURCES = {"forward_from_previous": -1, "backward_from_next": 1}


def connected(num_stages: int, has_wrap_links: bool) -> tuple[list[tuple[str, int, int]], int]:
    """Let all stages connect, each blocked in a call until its neighbor is in the other end's call.

    Returns the links as (direction, source, target), and how many of them connected sequentially.
    """
    calls = [warm_up_order(stage, num_stages, has_wrap_links=has_wrap_links) for stage in range(num_stages)]
    found, num_rounds = [], 0
    while any(calls):
        met = []
        for stage, mine in enumerate(calls):
            if mine and mine[0][1]:
                name = mine[0][0]
                peer = (stage + TARGETS[name]) % num_stages
                if calls[peer] and not calls[peer][0][1]:
                    other = calls[peer][0][0]
                    direction = name.partition("_")[0]
                    is_same = other.startswith(direction) and (peer + SOURCES[other]) % num_stages == stage
                    met += [(direction, stage, peer)] if is_same else []
        assert met, f"in a circle: {[call[:1] for call in calls]}"
        for _, source, target in met:
            calls[source].pop(0)
            calls[target].pop(0)
        found += met
        num_rounds += 1
    return found, num_rounds


@pytest.mark.parametrize("has_wrap_links", [False, True], ids=["line", "ring"])
def test_every_link_connects_in_few_rounds(has_wrap_links: bool) -> None:
    for num_stages in range(2, 18):
        found, num_rounds = connected(num_stages, has_wrap_links)
        links = [(stage, stage + 1) for stage in range(num_stages - 1)]
        links += [(num_stages - 1, 0)] if has_wrap_links else []
        expected = [("forward", source, target) for source, target in links]
        expected += [("backward", target, source) for source, target in links]
        assert sorted(found) == sorted(expected), f"{num_stages} stages"
        assert num_rounds <= 8, f"{num_stages} stages: the number of rounds does not depend on the depth"
