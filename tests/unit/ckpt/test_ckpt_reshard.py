"""`megatrain ckpt reshard`: the files are byte for byte those that a job with that layout writes."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

from megatrain.checkpoint.checked_files import find_stored
from megatrain.checkpoint.parameter_reader import bytes_of_kept_items
from megatrain.checkpoint_format.checkpoint_files import read_manifest
from megatrain.checkpoint_format.checkpoint_names import is_manifest_name
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.url_location import open_location
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.layout import Layout
from megatrain.conversion.reshard import ReshardReport, reshard
from megatrain.planning.peak_tensor_bytes import PeakTensorBytes
from tests.helpers.checkpoint_tree import put_main
from tests.helpers.saved_checkpoint import Ckpt, put_whole, whole_state, with_layout, write_as_job
from tests.helpers.training_case import make_config

UNTIED = {"model": {"has_tied_head": False}}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of one rank, which tests only read."""
    place, config = tmp_path_factory.mktemp("source") / "a", make_config()
    write_as_job(place, config, whole_state(config))
    return place


def contents(directory: Path) -> dict[str, bytes]:
    names = [path.name for path in directory.iterdir() if path.name != "COMMIT" and not is_manifest_name(path.name)]
    return {name: (directory / name).read_bytes() for name in names}


def options(layout: dict[str, int]) -> list[str]:
    return [word for axis, size in layout.items() for word in (f"--{axis}", str(size))]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"tp": 2, "pp": 2, "dp": 2}),
        ({"tp": 2, "pp": 2, "dp": 2}, {}),
        ({"dp": 4}, {"pp": 2, "chunks": 2}),
        ({"tp": 4}, {"tp": 2, "dp": 4}),
    ],
)
def test_files_are_those_of_a_job(
    ckpt: Ckpt, tmp_path: Path, before: dict[str, int], after: dict[str, int], precision: str
) -> None:
    config = make_config({"train": {"precision": precision}}, UNTIED if "tp" in after else {})
    state = whole_state(config)
    write_as_job(tmp_path / "a", with_layout(config, **before), state)
    expected = write_as_job(tmp_path / "b", with_layout(config, **after), state)

    found = ckpt("reshard", tmp_path / "a", "--output", tmp_path / "out", *options(after), "--json")

    assert contents(tmp_path / "out") == contents(tmp_path / "b")
    manifest = read_manifest(LocalLocation(tmp_path / "out"))
    for name in ("mesh", "config", "config_hash", "files", "step", "job", "branch", "data", "consumed_samples"):
        assert getattr(manifest, name) == getattr(expected, name), name
    assert (found["num_files"], found["step"]) == (len(expected.files), 7)
    assert "OK" in ckpt("verify", tmp_path / "out")


@pytest.mark.slow(kept=["before0-after0"])
@pytest.mark.parametrize(("before", "after"), [({"tp": 2}, {"tp": 4}), ({"tp": 8}, {"tp": 1, "pp": 2})])
def test_a_key_value_head_of_several_ranks_is_stored_once(
    ckpt: Ckpt, tmp_path: Path, before: dict[str, int], after: dict[str, int]
) -> None:
    config = make_config({"model": {"num_kv_heads": 2}})
    state = whole_state(config)
    for name, layout in (("a", before), ("b", after)):
        write_as_job(tmp_path / name, with_layout(config, **layout), state)

    ckpt("reshard", tmp_path / "a", "--output", tmp_path / "out", *options(after), "--json")

    assert contents(tmp_path / "out") == contents(tmp_path / "b")
    for name in ("a", "b"):
        place = LocalLocation(tmp_path / name)
        stored = find_stored(place, read_manifest(place)).tensors.values()
        assert all(sum(math.prod(item.sizes) for item in one.items) == one.numel for one in stored)
        assert "OK" in ckpt("verify", tmp_path / name)


def test_layers_are_split_by_the_option(ckpt: Ckpt, tmp_path: Path) -> None:
    """From one uneven split to another, and to the even split, which is the default."""
    config = make_config()
    state = whole_state(config)
    expected = {}
    for name, layers in (("a", (3, 1)), ("b", (1, 3)), ("even", ())):
        job = with_layout(config, pp=2)
        job = replace(job, parallel=replace(job.parallel, layers_per_chunk=layers))
        expected[name] = write_as_job(tmp_path / name, job, state)

    for name, arguments in (("b", ["--layers-per-chunk", 1, 3]), ("even", [])):
        text = ckpt("reshard", tmp_path / "a", "--output", tmp_path / f"{name}-out", "--pp", 2, *arguments)
        assert ("layers 1 + 3" in text) is (name == "b")
        assert contents(tmp_path / f"{name}-out") == contents(tmp_path / name)
        assert read_manifest(LocalLocation(tmp_path / f"{name}-out")).config == expected[name].config
    assert contents(tmp_path / "a") != contents(tmp_path / "b")
    message = ckpt("reshard", tmp_path / "a", "--output", tmp_path / "c", "--layers-per-chunk", 2, 2, code=78)
    assert "parallel.layers_per_chunk=[2, 2] has 2 entries" in message


ITEM_BYTES = 4 << 10
"""So small that even a tiny model has many items."""
KEPT_BYTES = bytes_of_kept_items(ITEM_BYTES)


def reshard_small_items(directory: Path, after: dict[str, int]) -> ReshardReport:
    """Write `directory`/a to `directory`/out in another layout, all in small items."""
    layout = Layout(**{f"{axis}_size": size for axis, size in after.items()})
    return reshard(
        LocalLocation(directory / "a"), LocalLocation(directory / "out"), layout, 1, max_item_bytes=ITEM_BYTES
    )


def data_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.distcp"))


@pytest.mark.slow
def test_memory_holds_some_items(ckpt: Ckpt, tmp_path: Path) -> None:
    config = make_config({"train": {"precision": "fp32"}})
    write_as_job(tmp_path / "a", with_layout(config, dp=4), whole_state(config), max_item_bytes=ITEM_BYTES)

    with PeakTensorBytes() as memory:
        reshard_small_items(tmp_path, {"tp": 2})

    assert data_bytes(tmp_path / "out") > 5 * KEPT_BYTES
    assert memory.peak_bytes <= KEPT_BYTES + 4 * ITEM_BYTES
    assert "OK" in ckpt("verify", tmp_path / "out")


@pytest.mark.slow(kept=["before3-after3"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"tp": 4}),
        ({}, {"dp": 4}),
        ({"tp": 4}, {}),
        ({"dp": 4}, {}),
        ({"tp": 2, "pp": 2, "dp": 2}, {"tp": 4, "dp": 2}),
        ({"pp": 4}, {"tp": 2, "dp": 4}),
    ],
)
def test_every_item_is_read_once(ckpt: Ckpt, tmp_path: Path, before: dict[str, int], after: dict[str, int]) -> None:
    config = make_config({"train": {"precision": "fp32"}}, UNTIED)
    write_as_job(tmp_path / "a", with_layout(config, **before), whole_state(config), max_item_bytes=ITEM_BYTES)
    num_bytes = data_bytes(tmp_path / "a")

    report = reshard_small_items(tmp_path, after)

    assert 0.95 * num_bytes < report.bytes_read <= num_bytes
    assert "OK" in ckpt("verify", tmp_path / "out")


@pytest.mark.slow
def test_files_are_written_some_at_a_time(ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config({"train": {"precision": "fp32"}}, UNTIED)
    write_as_job(tmp_path / "a", config, whole_state(config))
    ckpt("reshard", tmp_path / "a", "--output", tmp_path / "at-once", "--tp", 2, "--dp", 4)
    monkeypatch.setattr("megatrain.conversion.reshard._NUM_FILES_AT_ONCE", 3)
    ckpt("reshard", tmp_path / "a", "--output", tmp_path / "in-turn", "--tp", 2, "--dp", 4)
    assert contents(tmp_path / "at-once") == contents(tmp_path / "in-turn")


def test_files_beside_the_tensors_are_copied(ckpt: Ckpt, tmp_path: Path) -> None:
    config, text = make_config(), b'{"model": {}}'
    beside = {"tokenizer.json": text}
    manifest = write_as_job(tmp_path / "a", config, whole_state(config), beside=beside)

    ckpt("reshard", tmp_path / "a", "--output", tmp_path / "b")

    assert set(read_manifest(LocalLocation(tmp_path / "b")).files) == set(manifest.files)
    assert (tmp_path / "b/tokenizer.json").read_bytes() == text
    (tmp_path / "a/tokenizer.json").write_bytes(b"{}")
    message = ckpt("reshard", tmp_path / "a", "--output", tmp_path / "c", code=66)
    assert "tokenizer.json: differs from its entry in the manifest" in message


def test_a_layout_that_no_job_can_have_is_refused(ckpt: Ckpt, source: Path, tmp_path: Path) -> None:
    message = ckpt("reshard", source, "--output", tmp_path / "out", "--tp", 3, "--pp", 3, code=78)
    assert "parallel.tp_size=3 must divide model.num_heads=8" in message
    assert "model.num_layers=4 must be divisible" in message
    assert not (tmp_path / "out").exists()


def test_a_place_that_is_taken_is_refused(ckpt: Ckpt, source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").touch()
    arguments = ("reshard", source, "--output")
    assert "holds thesis.tex" in ckpt(*arguments, tmp_path / "out", code=66)
    assert "is a complete checkpoint already" in ckpt(*arguments, source, code=66)
    assert "is a file" in ckpt(*arguments, tmp_path / "out/thesis.tex", code=66)


def test_a_failed_attempt_leaves_nothing(
    ckpt: Ckpt, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    arguments = ("reshard", source, "--dp", 2, "--output")
    monkeypatch.setattr(LocalLocation, "write", _fails_at(".metadata"))
    for name in ("new", "there"):
        assert "no space left" in ckpt(*arguments, tmp_path / name, code=74)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]
    assert list((tmp_path / "there").iterdir()) == []


def test_output_of_a_killed_attempt_is_replaced(ckpt: Ckpt, source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for name in ("WRITING", "r000002-rank-00001.distcp", ".metadata", "index.json"):
        (tmp_path / "out" / name).write_bytes(b"{}")

    ckpt("reshard", source, "--output", tmp_path / "out")

    assert not (tmp_path / "out/r000002-rank-00001.distcp").exists()
    assert "OK" in ckpt("verify", tmp_path / "out")


def _fails_at(name: str) -> Callable[[LocalLocation, bytes], None]:
    write = LocalLocation.write

    def failing(self: LocalLocation, content: bytes) -> None:
        if self.name == name:
            raise CheckpointError(f"{self}: no space left")
        write(self, content)

    return failing


def test_a_damaged_source_is_refused(ckpt: Ckpt, source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "a")
    data = tmp_path / "a/r000002-rank-00000.distcp"
    content = bytearray(data.read_bytes())
    content[5000] ^= 4
    data.write_bytes(content)
    message = ckpt("reshard", tmp_path / "a", "--output", tmp_path / "out", code=66)
    assert f"{data}: the item at byte" in message
    assert not (tmp_path / "out").exists()


def test_a_store_without_directories_is_enough(ckpt: Ckpt, source: Path, tmp_path: Path) -> None:
    """Everything is behind a URL, where nothing can be renamed: source, output, and a run to choose from."""
    store = fsspec.filesystem("memory")
    root = "memory://test-ckpt-reshard"
    try:
        ckpt("reshard", source, "--output", f"{root}/out", "--tp", 2)
        ckpt("reshard", f"{root}/out", "--output", f"{root}/back")
        ckpt("reshard", f"{root}/back", "--output", tmp_path / "back")
        assert "OK" in ckpt("verify", f"{root}/out")
        assert contents(source) == contents(tmp_path / "back")

        checkpoints = open_location(f"{root}/run/checkpoints")
        put_main(checkpoints)
        for step in (10, 20, 30):
            put_whole(checkpoints / "main", step)
        ckpt("pin", f"{root}/run", "--step", 10)
        ckpt("restore", f"{root}/run", "--step", 20)
        ckpt("prune", f"{root}/run", "--abandoned", "--keep-last", 1, "--yes")
        states = {one["step"]: one["state"] for one in ckpt("ls", f"{root}/run", "--json")["checkpoints"]}
        assert states == {10: "pinned", 20: "committed"}
    finally:
        if store.exists("/test-ckpt-reshard"):
            store.rm("/test-ckpt-reshard", recursive=True)


@pytest.mark.parametrize(("layout", "schedule"), [({"tp": 2, "pp": 2}, "zero_bubble"), ({"dp": 2}, "1f1b")])
def test_a_schedule_of_pipelines_stays_where_there_is_one(
    ckpt: Ckpt, tmp_path: Path, layout: dict[str, int], schedule: str
) -> None:
    config = make_config({"parallel": {"pp_size": 2, "dp_size": 1, "schedule": "zero_bubble"}})
    write_as_job(tmp_path / "a", config, whole_state(config))

    ckpt("reshard", tmp_path / "a", "--output", tmp_path / "out", *options({"pp": 1, **layout}), "--json")

    manifest = read_manifest(LocalLocation(tmp_path / "out"))
    assert manifest.config["parallel"]["schedule"] == schedule
    assert "OK" in ckpt("verify", tmp_path / "out")
