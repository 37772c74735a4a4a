"""The index of shards: what tarfile finds in them, and each fault with its shard and member."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain.contracts.errors import DataError
from megatrain.data.pictures.bad_picture import BadPictureError
from megatrain.data.pictures.picture_index import INDEX_NAME, PictureIndex, build_index
from megatrain.data.pictures.picture_verification import verify_pictures
from megatrain.data.pictures.shard_reader import EncodedPicture, ShardReader
from tests.helpers.drawn_pictures import drawn, encoded, write_pictures, write_shard

PICTURE = encoded(drawn(40, 30))
LIMIT = 1 << 20


def read(directory: Path, number: int) -> EncodedPicture:
    return ShardReader(PictureIndex(directory)).read(number, LIMIT)


@pytest.mark.parametrize("pax", [False, True])
def test_index_finds_samples_that_tarfile_finds(pax: bool, tmp_path: Path) -> None:
    """Shards in natural order; long names, directories, other members and captions in JSON."""
    long = "d" * 120
    write_shard(tmp_path / "s-10.tar", {"z.jpg": PICTURE, "z.json": b'{"caption": "in json", "width": 3}'}, pax=pax)
    write_shard(
        tmp_path / "s-9.tar",
        {
            f"{long}/a.PNG": encoded(drawn(9, 9), "PNG"), f"{long}/a.txt": "caption \u00e9".encode(),
            "b.jpeg": PICTURE, "b.mask.png": b"no picture of b", "b.json": b'{"caption": "no"}', "b.txt": b"",
            "only.txt": b"a caption alone", "README": b"",
        },
        pax=pax,
    )  # fmt: skip
    index = build_index(tmp_path)

    found = [read(tmp_path, number) for number in range(index.num_samples)]
    assert [one.caption for one in found] == ["caption \u00e9", "", "in json"]
    with tarfile.open(tmp_path / "s-9.tar") as tar:
        member = tar.extractfile(f"{long}/a.PNG")
        assert member is not None
        assert found[0].content == member.read()
    assert [one.content == PICTURE for one in found] == [False, True, True]
    assert [(shard.name, shard.num_samples, shard.num_without_picture) for shard in index.shards] == [
        ("s-9.tar", 2, 1), ("s-10.tar", 1, 0),
    ]  # fmt: skip
    assert ShardReader(index).bad(0, "").member == f"{long}/a.PNG"


def test_reader_keeps_sixteen_shards_open(tmp_path: Path) -> None:
    files = write_pictures(tmp_path, 18, 1)
    reader = ShardReader(build_index(tmp_path))
    num_open = len(os.listdir("/proc/self/fd"))
    for number in (*range(18), 17, 0):
        assert reader.read(number, LIMIT).content == files[number]
    assert len(os.listdir("/proc/self/fd")) == num_open + 16
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_index_of_same_shards_has_the_same_digest(tmp_path: Path) -> None:
    for name in ("one", "two", "other"):
        (tmp_path / name).mkdir()
        write_pictures(tmp_path / name, 2, 4)
    write_shard(tmp_path / "other" / "shard-1.tar", {"0.jpg": PICTURE})
    digests = [build_index(tmp_path / name).digest for name in ("one", "two", "other")]
    assert digests[0] == digests[1] != digests[2]


def cut_in_member(content: bytes) -> bytes:
    return content[:1600]


def cut_after_member(content: bytes) -> bytes:
    return content[:1024]


def garbage_after_member(content: bytes) -> bytes:
    return content[:1024] + b"x" * 2048


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut_in_member, "s.tar: is cut off at byte 1600, in b.jpg"),
        (cut_after_member, "s.tar: is cut off or damaged at byte 1024, after a.txt"),
        (garbage_after_member, "s.tar: is cut off or damaged at byte 1024, after a.txt"),
        (lambda content: b"no tar" * 200, "s.tar: is not a tar file"),
        (lambda content: content[:0], "s.tar: is not a tar file"),
    ],
)
def test_index_of_a_cut_shard_names_shard_and_member(
    damage: Callable[[bytes], bytes], reason: str, tmp_path: Path
) -> None:
    shard = tmp_path / "s.tar"
    write_shard(shard, {"a.txt": b"caption", "b.jpg": PICTURE, "b.txt": b"caption"})
    shard.write_bytes(damage(shard.read_bytes()))
    with pytest.raises(DataError) as raised:
        build_index(tmp_path)
    assert reason in str(raised.value)
    assert not (tmp_path / INDEX_NAME).exists()


def test_index_of_a_cut_shard_keeps_what_is_whole(tmp_path: Path) -> None:
    shard = tmp_path / "s.tar"
    write_shard(shard, {"a.jpg": PICTURE, "a.txt": b"a", "b.txt": b"b", "b.jpg": PICTURE})
    end = 512 + -(-len(PICTURE) // 512) * 512 + 2 * 1024 + 512
    shard.write_bytes(shard.read_bytes()[: end + 100])
    assert build_index(tmp_path, allows_cut=True).num_samples == 2
    assert read(tmp_path, 0).caption == "a"
    with pytest.raises(BadPictureError, match=r"s\.tar: b\.jpg \(sample 1\): it is cut off: .* after 100 of them"):
        read(tmp_path, 1)


FAULTS = {
    "no-caption": ({"k.jpg": PICTURE}, "k.jpg", "it has no caption"),
    "bad-utf8": ({"k.jpg": PICTURE, "k.txt": b"\xff"}, "k.txt", "cannot be read as a caption"),
    "bad-json": ({"k.jpg": PICTURE, "k.json": b"{"}, "k.json", "cannot be read as a caption"),
    "half": ({"k.jpg": PICTURE, "k.json": b'{"caption": "\\ud800"}'}, "k.json", "cannot be read as a caption"),
    "no-key": ({"k.jpg": PICTURE, "k.json": b"[]"}, "k.json", 'has no text under the key "caption"'),
    "long": ({"k.jpg": PICTURE, "k.txt": bytes((1 << 20) + 1)}, "k.txt", "1048577 bytes, and the limit is 1048576"),
    "text": ({"k.jpg": b"hello", "k.txt": b""}, "k.jpg", "it is not a JPEG, PNG or WebP picture"),
    "huge": ({"k.png": encoded(drawn(1025, 1024), "PNG"), "k.txt": b""}, "k.png", "it has 1025 x 1024 pixels"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_sample_with_a_fault_is_named_by_its_member(name: str, tmp_path: Path) -> None:
    members, member, reason = FAULTS[name]
    write_shard(tmp_path / "s.tar", {"a.jpg": PICTURE, "a.txt": b"", **members, "l.jpg": PICTURE, "l.txt": b"last"})
    build_index(tmp_path)
    with pytest.raises(BadPictureError) as raised:
        read(tmp_path, 1)
    bad = raised.value.picture
    assert (bad.number, bad.shard, bad.member) == (1, str(tmp_path / "s.tar"), member)
    assert reason in bad.reason
    assert read(tmp_path, 2).caption == "last"
    assert [(problem.member, reason in problem.text) for problem in verify_pictures(tmp_path, LIMIT)] == [
        (member, True)
    ]


def test_shard_that_changed_costs_what_changed(tmp_path: Path) -> None:
    shard = tmp_path / "s.tar"
    write_shard(shard, {"a.jpg": PICTURE, "a.txt": b"a", "b.jpg": PICTURE, "b.txt": b"b"})
    build_index(tmp_path)
    assert list(verify_pictures(tmp_path, LIMIT)) == []
    content = bytearray(shard.read_bytes())
    content[600] ^= 1
    shard.write_bytes(content)
    with pytest.raises(BadPictureError, match=r"a\.jpg \(sample 0\): it has changed since the shard was indexed"):
        read(tmp_path, 0)
    assert read(tmp_path, 1).caption == "b"
    assert [problem.member for problem in verify_pictures(tmp_path, LIMIT)] == ["", "a.jpg"]
    shard.unlink()
    with pytest.raises(
        BadPictureError, match=r"s\.tar: the member at byte .* the shard cannot be opened: No such file"
    ):
        read(tmp_path, 1)


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"a.jpg": PICTURE, "a.png": PICTURE}, "a.png and a.jpg are both the picture of the sample a"),
        ({"a.txt": b"", "a.gif": b""}, "has no shard (*.tar) with a picture"),
    ],
)
def test_index_of_unclear_samples_is_refused(members: dict[str, bytes], reason: str, tmp_path: Path) -> None:
    write_shard(tmp_path / "s.tar", members)
    with pytest.raises(DataError) as raised:
        build_index(tmp_path)
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: content[:10], "less than its header"),
        (lambda content: b"X" + content[1:], "has magic b'XTPICS"),
        (lambda content: content[:60] + b"?" + content[61:], "differs from its checksum"),
        (lambda content: content[:-4], "and its header describes"),
    ],
)
def test_index_that_is_damaged_is_refused(change: Callable[[bytes], bytes], reason: str, tmp_path: Path) -> None:
    write_pictures(tmp_path, 1, 2)
    path = build_index(tmp_path).path
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match="megatrain data pictures index") as raised:
        PictureIndex(tmp_path)
    assert reason in str(raised.value)


def test_index_record_that_is_damaged_is_refused(tmp_path: Path) -> None:
    write_pictures(tmp_path, 1, 2)
    path = build_index(tmp_path).path
    content = bytearray(path.read_bytes())
    content[-30] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="the record of sample 1 differs from its checksum"):
        PictureIndex(tmp_path).record(1)
    with pytest.raises(DataError, match="has no sample 2; it has samples 0 to 1"):
        PictureIndex(tmp_path).record(2)


def test_index_is_replaced_only_on_request(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist; make it: `megatrain data pictures index"):
        PictureIndex(tmp_path)
    write_pictures(tmp_path, 1, 2)
    build_index(tmp_path)
    with pytest.raises(DataError, match="exists already; replace it with --force"):
        build_index(tmp_path)
    write_pictures(tmp_path, 2, 2)
    assert build_index(tmp_path, is_forced=True).num_samples == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == [INDEX_NAME, "shard-0.tar", "shard-1.tar"]
