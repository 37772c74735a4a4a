"""Whole parameters and boxes of a checkpoint, whatever the layout that wrote it."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.checkpoint.item_reader import tensor_of
from megatrain.checkpoint.parameter_reader import ParameterReader
from megatrain.checkpoint_format.checkpoint_files import read_manifest
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.manifest import FileEntry
from megatrain.checkpoint_format.stored_tensors import StoredItem
from megatrain.contracts.errors import CheckpointError
from megatrain.parallel.boxes import Box
from tests.helpers.checkpoint_tree import make_manifest
from tests.helpers.saved_checkpoint import whole_state, with_layout, write_as_job
from tests.helpers.training_case import make_config


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    place, config = tmp_path_factory.mktemp("saved"), make_config({"train": {"precision": "fp32"}})
    state = whole_state(config)
    write_as_job(place, with_layout(config, tp=2, pp=2, dp=2), state)
    return place, state


def reader_of(place: Path) -> ParameterReader:
    return ParameterReader(LocalLocation(place), read_manifest(LocalLocation(place)))


def test_every_parameter_is_whole(saved: tuple[Path, dict[str, Tensor]]) -> None:
    place, state = saved
    reader = reader_of(place)
    names = [key.removeprefix("model.") for key in state if key.startswith("model.")]
    assert reader.tensors.keys() == state.keys()
    for name in names:
        assert torch.equal(reader.read_parameter(name), state[f"model.{name}"])


def test_an_average_of_the_weights_is_read_in_their_place(
    saved: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    config = make_config({"train": {"precision": "fp32"}, "model": {"num_layers": 1}, "optimizer": {"ema_decay": 0.9}})
    state = whole_state(config)
    write_as_job(tmp_path, with_layout(config, tp=2, dp=2), state)
    reader, name = reader_of(tmp_path), "blocks.0.mlp_branch.mlp.down.weight"

    assert torch.equal(reader.read_parameter(name, "ema"), state[f"optimizer.ema.{name}"])
    assert torch.equal(reader.read_parameter(name), state[f"model.{name}"])
    with pytest.raises(CheckpointError, match=r"no average of the weights .*optimizer.ema_decay=0; leave out --ema"):
        reader_of(saved[0]).read_parameter(name, "ema")


def test_any_box_is_that_part(saved: tuple[Path, dict[str, Tensor]]) -> None:
    place, state = saved
    key = next(key for key in state if key.endswith("mlp.down.weight") and "exp_avg_sq" in key)
    found = reader_of(place).read_box(key, tuple(state[key].shape), Box((3, 7), (11, 90)))
    assert torch.equal(found, state[key][3:14, 7:97])


def test_just_what_is_needed_is_read(saved: tuple[Path, dict[str, Tensor]]) -> None:
    place, state = saved
    reader = reader_of(place)
    reader.read_parameter("embedding.word.weight")
    reader.read_parameter("embedding.word.weight")
    lists = sum(path.stat().st_size for path in place.glob("*.distcp"))
    assert reader.bytes_read < state["model.embedding.word.weight"].nbytes + lists / 4


def test_missing_parameter_is_named(saved: tuple[Path, dict[str, Tensor]]) -> None:
    reader, (manifest,) = reader_of(saved[0]), saved[0].glob("*-manifest-*.json")
    with pytest.raises(CheckpointError, match=rf"holds no tensor model\.lm_head; .* its {manifest.name}$"):
        reader.read_parameter("lm_head")
    with pytest.raises(
        CheckpointError, match=rf"has shape .*, and this configuration requires \(3,\); .* its {manifest.name}$"
    ):
        reader.read_box("model.embedding.word.weight", (3,), Box((0,), (3,)))


def tensor_in(content: bytes) -> Tensor:
    """Read an archive as the item of a tensor of shape [2, 3]."""
    item = StoredItem((0, 0), (2, 3), "a.distcp", 640, len(content))
    raw = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return tensor_of(raw, LocalLocation(Path("/saved")), "model.w", item, torch.float32)


def archive_of(value: Any) -> bytes:
    """Return what another program may have written: torch's older format."""
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


WRONG_ARCHIVES = {
    "other shape": archive_of(torch.zeros(6)),
    "no tensor": archive_of({"w": 1}),
    "refused class": archive_of(Path),
    "no archive": b"garbage",
    "half a pickle": b"\x80",
    "begin of a pickle": b"\x80\x02",
}


def test_archive_of_another_program_is_read() -> None:
    values = torch.arange(6.0).view(2, 3)
    assert torch.equal(tensor_in(archive_of(values)), values)


@pytest.mark.parametrize("content", WRONG_ARCHIVES.values(), ids=WRONG_ARCHIVES)
def test_archive_without_the_tensor_is_named(content: bytes) -> None:
    named = re.escape("/saved/a.distcp: model.w at byte 640 is not a tensor of shape (2, 3): ")
    with pytest.raises(CheckpointError, match=named):
        tensor_in(content)


def test_another_index_is_refused(saved: tuple[Path, dict[str, Tensor]]) -> None:
    place = LocalLocation(saved[0])
    manifest = read_manifest(place)
    files = {**manifest.files, "index.json": FileEntry(3, "sha256:" + "0" * 64)}
    with pytest.raises(CheckpointError, match=r"index\.json: differs from its entry in the manifest"):
        ParameterReader(place, make_manifest(files=files))
