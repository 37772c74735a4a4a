"""The protocol of the ring: every order of the stores of a loader, which may be killed, and the reads of two ranks."""

from __future__ import annotations

from typing import NamedTuple

from megatrain.data.loader.decision import Fill, Idle, decide
from megatrain.data.loader.plan import Share
from megatrain.data.loader.ring import Ring
from megatrain.data.loader.ring_layout import RingLayout

NUM_STEPS = 3
NUM_READERS = 2
SHARES = (Share(0, tuple(range(NUM_READERS)), has_tokens=True, encoders=()),)


class World(NamedTuple):
    """The ring, the position of the loader in its fill, and the position of each rank.

    loader: None between fills; else the fill and the stores that it has made. ranks: the step, and 0: about to store
    that earlier steps are done, 1: about to check, 2 and 3: has the step and reads it twice.
    """

    words: bytes
    contents: tuple[int, ...]
    loader: tuple[Fill, int] | None
    ranks: tuple[tuple[int, int], ...]
    kills: int


def explore(depth: int) -> int:
    """Visit all states; return their number. A content is the number of the step, -1 while it is written."""
    layout = RingLayout(depth, 1, NUM_READERS, 1, 1, 1, has_document_mask=False)
    start = World(bytes(layout.num_words * 8), (-1,) * depth, None, ((0, 0),) * NUM_READERS, 1)
    seen, waiting = {start}, [start]
    while waiting:
        world = waiting.pop()
        following = [*after_loader(world, layout), *after_ranks(world, layout)]
        is_over = all(step == NUM_STEPS for step, _ in world.ranks)
        assert is_over or following, f"no process can continue: {world}"
        for one in following:
            if one not in seen:
                seen.add(one)
                waiting.append(one)
    assert any(all(step == NUM_STEPS for step, _ in world.ranks) for world in seen)
    return len(seen)


def after_loader(world: World, layout: RingLayout) -> list[World]:
    words = bytearray(world.words)
    ring = Ring(words, layout)
    if world.loader is None:
        due = decide(SHARES, NUM_STEPS, layout.depth, ring.state())
        return [] if isinstance(due, Idle) else [world._replace(loader=(due, 0))]
    due, stores = world.loader
    contents = list(world.contents)
    if stores == 0:
        ring.begin(due.share, due.step)
    elif stores in (1, 2):
        contents[due.step % layout.depth] = -1 if stores == 1 else due.step
    else:
        ring.publish(due.share, due.step)
    after = world._replace(
        words=bytes(words), contents=tuple(contents), loader=None if stores == 3 else (due, stores + 1)
    )
    killed = [world._replace(loader=None, kills=world.kills - 1)] if world.kills else []
    return [after, *killed]


def after_ranks(world: World, layout: RingLayout) -> list[World]:
    found = []
    for reader, (step, place) in enumerate(world.ranks):
        if step == NUM_STEPS:
            continue
        words = bytearray(world.words)
        ring = Ring(words, layout)
        if place == 0:
            ring.set_done(reader, step)
        elif place == 1 and not ring.is_filled(0, step):
            continue
        elif place > 1:
            assert world.contents[step % layout.depth] == step, f"rank {reader} reads another step: {world}"
        here = (step + 1, 0) if place == 3 else (step, place + 1)
        ranks = (*world.ranks[:reader], here, *world.ranks[reader + 1 :])
        found.append(world._replace(words=bytes(words), ranks=ranks))
    return found


def test_no_order_of_steps_shows_a_rank_another_step() -> None:
    assert [explore(depth) > 200 for depth in (1, 2, 3)] == [True] * 3
