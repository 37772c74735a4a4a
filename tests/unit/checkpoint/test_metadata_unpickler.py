"""Reading `.metadata`: what torch's own reader says of torch's own checkpoints, and nothing that lies."""

from __future__ import annotations

import pickle
import pickletools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from io import BytesIO
from itertools import pairwise
from pathlib import Path, PureWindowsPath
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatrain.checkpoint.metadata_unpickler import read_metadata
from megatrain.checkpoint.stored_tensors import (
    DTYPE_BYTES,
    MAX_BYTES,
    StoredBytes,
    StoredItem,
    StoredTensor,
    StoredTensors,
)
from megatrain.contracts.errors import CheckpointError

NUM_RANKS = 4
WHOLE = {"rows": torch.arange(10.0).view(2, 5), "grid": torch.arange(40.0).view(10, 4), "same": torch.ones(6)}


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save_plain(place: Path | str) -> Path:
    """Save what a training script would, in one process, and return the directory."""
    state = {
        "model": {"weight": torch.randn(4, 3), "scale": torch.tensor(3.0), "empty": torch.zeros(0, 3)},
        "narrow": [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, 5, dtype=torch.float8_e4m3fn)],
        "masks": {"bool": torch.ones(2, dtype=torch.bool), "long": torch.arange(7), "complex": torch.zeros(2, 2) * 1j},
        "view": torch.randn(8, 8)[2:4, ::2],
        "image": torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "leaf": torch.zeros(2, requires_grad=True),
        "step": 5,
        "schedule": [{"lr": 0.1}],
    }
    with quiet():
        dcp.save(state, checkpoint_id=place, no_dist=True)
    return Path(place)


def save_sharded(directory: Path) -> Path:
    """Save DTensors of four ranks as torch does, all in this process, and return the directory.

    Two ranks have no row of "rows"; "same" is on all ranks and saved once.
    """
    parts = []
    for rank in range(NUM_RANKS):
        dist.init_process_group("fake", rank=rank, world_size=NUM_RANKS, store=FakeStore())
        try:
            grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
            flat = init_device_mesh("cpu", (NUM_RANKS,))
            placed = {"rows": (flat, [Shard(0)]), "grid": (grid, [Shard(0), Shard(1)]), "same": (flat, [Replicate()])}
            state: dict[str, Any] = {"progress": {"step": 5}}
            for name, (mesh, placements) in placed.items():
                whole = WHOLE[name]
                sizes, offsets = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
                local = whole[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))].clone()
                state[name] = DTensor.from_local(
                    local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
                )
            writer, planner = FileSystemWriter(directory), DefaultSavePlanner()
            planner.set_up_planner(state, writer.storage_meta(), rank == 0)
            writer.set_up_storage_writer(rank == 0)
            parts.append((writer, planner, writer.prepare_local_plan(planner.create_local_plan())))
        finally:
            dist.destroy_process_group()
    first_writer, first_planner, _ = parts[0]
    plans, metadata = first_planner.create_global_plan([plan for _, _, plan in parts])
    plans = first_writer.prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).value()
        for (writer, planner, _), plan in zip(parts, plans, strict=True)
    ]
    first_writer.finish(metadata, results)
    return directory


def torch_says(directory: Path) -> StoredTensors:
    """Return what torch's reader, which executes the pickle, makes of it."""
    return in_our_words(FileSystemReader(directory).read_metadata())


def in_our_words(metadata: Metadata) -> StoredTensors:
    def stored(key: str, offsets: torch.Size | None) -> tuple[str, int, int]:
        info = metadata.storage_data[MetadataIndex(key, offsets)]
        return info.relative_path, info.offset, info.length

    tensors, byte_entries = {}, {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            byte_entries[key] = StoredBytes(key, *stored(key, None))
            continue
        items = [
            StoredItem(tuple(chunk.offsets), tuple(chunk.sizes), *stored(key, chunk.offsets)) for chunk in entry.chunks
        ]
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[key] = StoredTensor(key, dtype, tuple(entry.size), tuple(items))
    return StoredTensors(tensors, byte_entries)


def read_from(directory: Path) -> StoredTensors:
    return read_metadata((directory / ".metadata").read_bytes(), str(directory / ".metadata"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_plain(tmp_path_factory.mktemp("plain") / "checkpoint")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sharded(tmp_path_factory.mktemp("sharded") / "checkpoint")


# What torch writes


def test_a_plain_checkpoint_is_read_as_torch_reads_it(plain: Path) -> None:
    found = read_from(plain)

    assert found == torch_says(plain)
    assert set(found.byte_entries) == {"step", "schedule.0.lr"}
    assert found.tensors["narrow.1"].dtype == "float8_e4m3fn"
    assert (found.tensors["model.empty"].numel, found.tensors["model.scale"].num_bytes) == (0, 4)
    # stock torch writes items back to back, so the ranges fill the file
    ((file, ranges),) = found.ranges_by_file().items()
    assert sum(length for _, length in ranges) == (plain / file).stat().st_size
    assert all(offset + length == later for (offset, length), (later, _) in pairwise(ranges))


def test_a_sharded_checkpoint_is_read_as_torch_reads_it(sharded: Path) -> None:
    found = read_from(sharded)

    assert found == torch_says(sharded)
    assert [item.sizes for item in found.tensors["grid"].items] == [(5, 2)] * 4
    assert [item.sizes for item in found.tensors["rows"].items] == [(1, 5), (1, 5), (0, 5)]
    assert len(found.tensors["same"].items) == 1
    assert found.ranges_by_file().keys() == {file.name for file in sharded.glob("*.distcp")}


def test_a_checkpoint_saved_to_a_path_given_as_text(tmp_path: Path) -> None:
    assert read_from(save_plain(str(tmp_path / "c"))) == torch_says(tmp_path / "c")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_other_picklers_and_protocols_say_the_same(sharded: Path, protocol: int) -> None:
    metadata = FileSystemReader(sharded).read_metadata()
    expected = in_our_words(metadata)

    for raw in (pickle.dumps(metadata, protocol), pickle._dumps(metadata, protocol)):
        assert read_metadata(raw, "x") == expected
        assert read_metadata(pickletools.optimize(raw), "x") == expected


class EnumByName(pickle.Pickler):
    """Pickles members of enumerations as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


def pickled_by_name(metadata: Metadata) -> bytes:
    file = BytesIO()
    EnumByName(file).dump(metadata)
    return file.getvalue()


def test_other_pythons_say_the_same(plain: Path) -> None:
    metadata = FileSystemReader(plain).read_metadata()
    expected = in_our_words(metadata)

    by_name = pickled_by_name(metadata)
    assert b"getattr" in by_name
    assert read_metadata(by_name, "x") == expected
    # Python 3.13 pickles paths as pathlib._local.PosixPath
    raw = pickle.dumps(metadata)
    assert read_metadata(raw.replace(b"\x8c\x07pathlib", b"\x8c\x0epathlib._local"), "x") == expected
    metadata.storage_meta.checkpoint_id = PureWindowsPath("C:/checkpoints")
    assert read_metadata(pickle.dumps(metadata), "x") == expected


def test_every_dtype_of_torch_is_known() -> None:
    dtypes = {found for found in vars(torch).values() if isinstance(found, torch.dtype)}

    assert {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in dtypes}.items() <= DTYPE_BYTES.items()
    for dtype in dtypes:
        raw = pickle.dumps(one_tensor(dtype=dtype))
        assert read_metadata(raw, "x").tensors["w"].dtype == str(dtype).removeprefix("torch.")


# What does not fit together


def one_tensor(
    shape: tuple[int, ...] = (4, 6),
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (((0, 0), (4, 6)),),
    dtype: torch.dtype = torch.float32,
    **info: Any,
) -> Metadata:
    """Return metadata of a tensor "w" in `boxes`, of which _StorageInfo may be changed."""
    values = {"relative_path": "a.distcp", "offset": 0, "length": 1000, **info}
    return Metadata(
        state_dict_metadata={
            "w": TensorStorageMetadata(
                TensorProperties(dtype=dtype),
                torch.Size(shape),
                [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes],
            )
        },
        storage_data={MetadataIndex("w", offsets, 0): _StorageInfo(**values) for offsets, _ in boxes},
    )


def changed(change: Callable[[Metadata], None]) -> Metadata:
    metadata = one_tensor()
    change(metadata)
    return metadata


def with_key(key: Any) -> Metadata:
    def add(metadata: Metadata) -> None:
        metadata.state_dict_metadata[key] = metadata.state_dict_metadata.pop("w")

    return changed(add)


def set_properties(**values: Any) -> Callable[[Metadata], None]:
    return lambda metadata: vars(metadata.state_dict_metadata["w"].properties).update(values)


def set_fields(**values: Any) -> Callable[[Metadata], None]:
    return lambda metadata: vars(metadata.state_dict_metadata["w"]).update(values)


def delete_field(name: str) -> Callable[[Metadata], None]:
    return lambda metadata: vars(metadata.state_dict_metadata["w"]).pop(name)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (one_tensor(offset=-1), r"c/\.metadata: 'w': the place in the file is -1, expected an integer of at least 0"),
        (one_tensor(length=-1), r"'w': the length in the file is -1"),
        (one_tensor(length=2**63), r"the length in the file is 9223372036854775808, expected .* below 2\^63"),
        (
            one_tensor(length=2**100),
            r"the length in the file is 1267650600228229401496703205376, expected .* below 2\^63",
        ),
        (one_tensor(offset=2**63 - 1), r"the end in the file is 9223372036854776807"),
        (one_tensor(offset=True), r"the place in the file is True or False"),
        (one_tensor(offset="0"), r"the place in the file is a text"),
        (
            one_tensor(length=95),
            r"95 bytes are stored for the box of \(4, 6\) at \(0, 0\), which needs more in float32",
        ),
        (one_tensor(relative_path="../b"), r"a file is '\.\./b', expected a path inside the checkpoint directory"),
        (one_tensor(relative_path="a/../../b"), r"a file is 'a/\.\./\.\./b'"),
        (one_tensor(relative_path="/etc/passwd"), r"a file is '/etc/passwd'"),
        (one_tensor(relative_path="s3://bucket/a"), r"a file is 's3://bucket/a'"),
        (one_tensor(relative_path="..\\b"), r"a file is '\.\.\\\\b'"),
        (one_tensor(relative_path="a\0b"), r"a file is 'a\\x00b'"),
        (one_tensor(relative_path=""), r"a file is ''"),
        (one_tensor(relative_path="a" * 2000), r"a file is 'a{120}\.\.\.'"),
        (one_tensor(relative_path=["a"]), r"its file is a list, expected a path"),
        (one_tensor(transform_descriptors=["zstd"]), r"transformed by an extension of torch"),
        (one_tensor(boxes=(((0, 0), (4, 7)),)), r"the box of \(4, 7\) at \(0, 0\) is not inside the shape \(4, 6\)"),
        (one_tensor(boxes=(((1, 0), (4, 6)),)), r"is not inside the shape"),
        (one_tensor(boxes=(((0,), (4,)),)), r"the box of \(4,\) at \(0,\) is not inside the shape \(4, 6\)"),
        (one_tensor(boxes=(((-1, 0), (4, 6)),)), r"the offset of a box is -1"),
        (one_tensor(boxes=(((0, 0), (4, -6)),)), r"the size of a box is -6"),
        (one_tensor(shape=(-4, 6)), r"the shape is -4, expected an integer of at least 0"),
        (one_tensor(boxes=(((0, 0), (2, 6)),)), r"its boxes have 12 elements, the shape \(4, 6\) has 24"),
        (one_tensor(boxes=(((0, 0), (4, 6)), ((0, 0), (4, 6)))), r"storage_data has no entry for the box at \(0, 0\)"),
        (one_tensor(boxes=()), r"its boxes have 0 elements, the shape \(4, 6\) has 24"),
        (
            one_tensor((1,) * 65, ((((0,) * 65), ((1,) * 65)),)),
            r"makes a call, or passes arguments, that no checkpoint's metadata needs",
        ),
        (with_key(3), r"has a dict with the key an integer"),
        (with_key("k" * 5000), r"'k{120}\.\.\.': storage_data has no entry for the box"),
        (with_key("v"), r"'v': storage_data has no entry for the box at \(0, 0\)"),
        (changed(lambda m: m.state_dict_metadata.clear()), r"'w': storage_data has a box at \(0, 0\) that state_dict"),
        (changed(lambda m: m.storage_data.clear()), r"'w': storage_data has no entry for the box at \(0, 0\)"),
        (
            changed(lambda m: m.storage_data.update({MetadataIndex("b"): _StorageInfo("a", 0, 1)})),
            r"'b': storage_data has bytes that state_dict_metadata does not have",
        ),
        (
            changed(lambda m: m.storage_data.update({MetadataIndex(3): _StorageInfo("a", 0, 1)})),
            r"has a dict with the key a MetadataIndex",
        ),
        (changed(lambda m: m.storage_data.update({b"w": 3})), r"opcode SHORT_BINBYTES, which no checkpoint's metadata"),
        (changed(lambda m: m.storage_data.update({"w": 3})), r"a key of storage_data: a text, expected a Metadata"),
        (
            changed(lambda m: m.storage_data.update({MetadataIndex("b"): 3})),
            r"'b': storage_data has bytes that state_dict_metadata does not have",
        ),
        (changed(lambda m: setattr(m, "storage_data", None)), r"storage_data: None, expected a dict"),
        (changed(lambda m: setattr(m, "state_dict_metadata", [])), r"state_dict_metadata: a list, expected a dict"),
        (changed(lambda m: m.state_dict_metadata.update(b=3)), r"'b': an integer, expected a TensorStorageMetadata"),
        (
            changed(lambda m: setattr(m, "shards", 3)),
            r"sets the field 'shards' of a Metadata, which this program does not know",
        ),
        (changed(set_fields(chunks=())), r"its chunks are a tuple, expected a list"),
        (changed(set_fields(size=(4, 6))), r"the shape is a tuple, expected a Size"),
        (changed(set_fields(properties=None)), r"its properties are not those of a plain \(strided\) tensor"),
        (changed(set_properties(layout=torch.sparse_coo)), r"its properties are not those of a plain"),
        (changed(set_properties(layout=3)), r"its properties are not those of a plain"),
        (changed(set_properties(requires_grad=1)), r"its properties are not those of a plain"),
        (changed(set_properties(dtype=torch.Size)), r"its properties are not those of a plain"),
        (changed(set_properties(dtype=None)), r"its properties are not those of a plain"),
        (changed(delete_field("size")), r"'w': a TensorStorageMetadata without the field size"),
        ({"state_dict_metadata": {}}, r"the whole: a dict, expected a Metadata"),
        (TensorProperties(), r"the whole: a TensorProperties, expected a Metadata"),
        (Metadata, r"the whole: a type, expected a Metadata"),
        (None, r"the whole: None, expected a Metadata"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(metadata: Any, message: str) -> None:
    assert read_metadata(pickle.dumps(one_tensor()), "c/.metadata").tensors["w"].num_bytes == 96
    with pytest.raises(CheckpointError, match=message) as caught:
        read_metadata(pickle.dumps(metadata), "c/.metadata")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("is_by_name", "found", "instead"),
    [
        (True, b"TORCH_CONTIGUOUS_FORMAT", b"TORCH_CONTIGUOUS_FORMA_"),
        (True, b"TORCH_CONTIGUOUS_FORMAT", b"__init_subclass__\0\0\0\0\0\0"),
        (True, b"_MEM_FORMAT_ENCODING", b"TensorStorageMetadat"),
        (True, b"\x8c\x14_MEM_FORMAT_ENCODING", b"\x8c\x10TensorProperties"),
        (True, b"\x8c\x08builtins\x94\x8c\x07getattr", b"\x8c\x05torch\x94\x8c\x04Size"),
        (False, b"\x94K\x00\x85", b"\x94K\x03\x85"),
        (False, b"\x94K\x00\x85", b"\x94N\x85"),
        (False, b"\x94K\x00\x85", b"\x94)"),
        (False, b"torch.strided", b"torch.strideX"),
    ],
)
def test_a_memory_format_or_layout_that_torch_has_not_is_refused(
    is_by_name: bool, found: bytes, instead: bytes
) -> None:
    raw = (pickled_by_name if is_by_name else pickle.dumps)(one_tensor())
    assert found in raw
    with pytest.raises(CheckpointError):
        read_metadata(raw.replace(found, instead, 1), "x")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            Metadata(
                {"w": BytesStorageMetadata(), "v": BytesStorageMetadata()},
                storage_data={MetadataIndex("w"): _StorageInfo("a", 0, 1)},
            ),
            "has a dict with a key twice: 'w'",
        ),
        (
            Metadata(
                {"w": BytesStorageMetadata()},
                storage_data={MetadataIndex(key): _StorageInfo("a", 0, 1) for key in "wv"},
            ),
            "has a dict with a key twice: .*fqn='w', offset=None",
        ),
    ],
)
def test_what_appears_twice_is_refused(metadata: Metadata, message: str) -> None:
    # No dict has a key twice, but a file may.
    raw = pickle.dumps(metadata, 2).replace(b"X\x01\x00\x00\x00v", b"X\x01\x00\x00\x00w")
    with pytest.raises(CheckpointError, match=message):
        read_metadata(raw, "x")


def test_fields_that_are_new_and_unused_are_no_obstacle() -> None:
    metadata = one_tensor()
    metadata.added_later = None
    assert read_metadata(pickle.dumps(metadata), "x") == in_our_words(one_tensor())


def test_metadata_that_nobody_could_need_is_not_even_read() -> None:
    with pytest.raises(
        CheckpointError, match=r"268435457 bytes, more than the 268435456 that the description of a checkpoint may have"
    ):
        read_metadata(bytes(MAX_BYTES + 1), "x")
