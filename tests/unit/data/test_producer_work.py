"""What producers of pictures did: joined over reads, and kept in the ring of the loader."""

from __future__ import annotations

import numpy as np
import pytest

from megatrain.data.loader.ring import Ring
from megatrain.data.loader.ring_layout import RingLayout
from megatrain.data.loader_report import LoaderRead
from megatrain.data.producer_work import ProducerWork, ProducerWorks, summed, waited_ns

NOT_ASKED = ProducerWork()
FAILED = ProducerWork(start_ns=50, duration_ns=100, num_failed=2)
EARLY = ProducerWork(100, 40, 16, 5000, num_answered=1, num_failed=0, answering_ns=40, num_waiting=3)
LATE = ProducerWork(120, 80, 24, 7000, num_answered=2, num_failed=1, answering_ns=110, num_waiting=1)


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        ([], ()),
        ([(EARLY, NOT_ASKED)], (EARLY, NOT_ASKED)),
        ([(EARLY, NOT_ASKED), (LATE, FAILED)], (ProducerWork(100, 100, 40, 12000, 3, 1, 150, 3), FAILED)),
        ([(FAILED,), (NOT_ASKED,), (LATE,)], (ProducerWork(50, 150, 24, 7000, 2, 3, 110, 1),)),
    ],
)
def test_work_of_reads_is_summed_by_producer(reads: list[ProducerWorks], expected: ProducerWorks) -> None:
    assert summed(reads) == expected


@pytest.mark.parametrize(
    ("works", "expected"),
    [
        ((), (0, 0)),
        ((NOT_ASKED, NOT_ASKED), (0, 0)),
        ((NOT_ASKED, LATE), (120, 80)),
        ((LATE, EARLY, FAILED), (50, 150)),
    ],
)
def test_read_waits_until_the_last_producer_has_answered(works: ProducerWorks, expected: tuple[int, int]) -> None:
    assert waited_ns(works) == expected


def test_mean_time_of_an_answer_is_zero_without_one() -> None:
    assert [work.answer_s for work in (NOT_ASKED, FAILED, EARLY, LATE)] == [0.0, 0.0, 40e-9, 55e-9]


def test_ring_keeps_the_work_of_each_slot_apart() -> None:
    layout = RingLayout(2, 2, 1, 1, 1, 4, has_document_mask=False, num_producers=3)
    buffer = bytearray(layout.num_bytes)
    ring, content = Ring(buffer, layout), np.frombuffer(buffer, np.uint8)[layout.content(0, 0) :]
    slots = [(share, step) for share in range(2) for step in range(2)]
    reads = [
        LoaderRead(
            number,
            10,
            20,
            tuple(ProducerWork(*range(100 * number + place, 100 * number + place + 8)) for place in range(3)),
        )
        for number in range(4)
    ]
    for (share, step), read in zip(slots, reads, strict=True):
        ring.put_read(share, step, read)
    assert [ring.read_of(share, step) for share, step in slots] == reads
    assert ring.state().filled == ((0, 0), (0, 0))
    assert not content.any()
    ring.put_read(1, 2, LoaderRead(7, 8, 0))  # a read that has failed, in the slot of step 0
    assert ring.read_of(1, 2) == LoaderRead(7, 8, 0, (NOT_ASKED,) * 3)
