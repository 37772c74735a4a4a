"""Reads in several calls: all parts are of one revision, or the read begins again."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator

import pytest

from megatrain_job.coordination.client import EtcdClient
from megatrain_job.coordination.errors import FutureRevisionError
from megatrain_job.coordination.maintenance import compact
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_job.coordination.wire import KeyRange, Range
from tests.helpers.etcd_proxy import Conduct, EtcdProxy
from tests.helpers.etcd_server import EtcdServers, post

Read = Callable[[EtcdClient, str], tuple[int, list[bytes]]]


@pytest.fixture
def proxy(etcd: EtcdServers) -> Iterator[EtcdProxy]:
    with EtcdProxy(etcd.members[0].client_port) as made:
        yield made


def before_page(proxy: EtcdProxy, number: int, act: Callable[[], object]) -> None:
    """Call a function between the pages of a read: page 0 is the first."""
    pages = itertools.count()

    def watch(request: bytes) -> None:
        if b"/v3/kv/range" in request and next(pages) == number:
            act()

    proxy.before = watch


def in_pages(client: EtcdClient, prefix: str) -> tuple[int, list[bytes]]:
    answer = client.read_all(KeyRange.prefix(prefix), page_keys=2)
    return answer.revision, [item.value for item in answer.items]


def as_ranges(client: EtcdClient, prefix: str) -> tuple[int, list[bytes]]:
    return _in_ranges(client, prefix, num_at_once=1)


def as_ranges_at_once(client: EtcdClient, prefix: str) -> tuple[int, list[bytes]]:
    return _in_ranges(client, prefix, num_at_once=3)


def _in_ranges(client: EtcdClient, prefix: str, num_at_once: int) -> tuple[int, list[bytes]]:
    parts = [KeyRange((prefix + start).encode(), (prefix + end).encode()) for start, end in ("02", "23", "34", "49")]
    answers = client.read_together([Range(keys) for keys in parts], num_at_once=num_at_once)
    return answers[0].revision, [item.value for answer in answers for item in answer.items]


in_each_way = pytest.mark.parametrize("read", [in_pages, as_ranges, as_ranges_at_once])


@in_each_way
def test_later_parts_do_not_see_what_is_written_between(
    client: EtcdClient, prefix: str, proxy: EtcdProxy, read: Read
) -> None:
    for number in range(4):
        last = client.put(f"{prefix}{number}", "old")
    before_page(proxy, 1, lambda: [client.put(f"{prefix}{number}", "new") for number in (3, 4)])

    with EtcdClient(EtcdSettings.of([proxy.url])) as reader:
        found = read(reader, prefix)

    assert client.get(f"{prefix}4") is not None
    assert found == (last, [b"old"] * 4)


@in_each_way
def test_parts_begin_again_when_their_revision_is_compacted(
    client: EtcdClient, prefix: str, proxy: EtcdProxy, read: Read
) -> None:
    for number in range(4):
        client.put(f"{prefix}{number}", "old")
    before_page(proxy, 1, lambda: compact(client, client.put(f"{prefix}4", "new")))

    with EtcdClient(EtcdSettings.of([proxy.url])) as reader:
        assert read(reader, prefix)[1] == [b"old"] * 4 + [b"new"]


def give_future_revisions(etcd: EtcdServers, proxy: EtcdProxy, count: int) -> None:
    """Give the first `count` reads without a revision one that etcd does not have, as if it was emptied since."""

    def is_first_part(request: bytes) -> bool:
        return b"/v3/kv/range" in request and b'"revision"' not in request and proxy.num_corrupted < count

    def make_answer(request: bytes) -> None:
        if is_first_part(request):
            answer = post(etcd.urls[0], "/v3/kv/range", json.loads(request.partition(b"\r\n\r\n")[2]))
            answer["header"]["revision"] = str(2**62)
            content = json.dumps(answer).encode()
            proxy.garbage = [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content)]

    proxy.before, proxy.corrupts, proxy.conduct = make_answer, is_first_part, Conduct.GARBAGE


@in_each_way
@pytest.mark.parametrize(("count", "is_read"), [(4, True), (5, False)])
def test_parts_begin_again_when_etcd_was_emptied(
    client: EtcdClient, etcd: EtcdServers, prefix: str, proxy: EtcdProxy, read: Read, count: int, is_read: bool
) -> None:
    for number in range(4):
        last = client.put(f"{prefix}{number}", "old")
    give_future_revisions(etcd, proxy, count)

    with EtcdClient(EtcdSettings.of([proxy.url])) as reader:
        if is_read:
            assert read(reader, prefix) == (last, [b"old"] * 4)
        else:
            with pytest.raises(FutureRevisionError, match="required revision is a future revision"):
                read(reader, prefix)
    assert proxy.num_corrupted == count


def test_revision_of_one_part_alone_is_refused(client: EtcdClient, prefix: str) -> None:
    part = Range(KeyRange.prefix(prefix))
    for parts in ([Range(part.keys, revision=1), part], [part, Range(part.keys, revision=1)]):
        with pytest.raises(ValueError, match="are at the newest revision; use `read` for another one"):
            client.read_together(parts)
