"""A mesh that is also divided along cp and ep: its groups, the holders of copies, and its record in a checkpoint."""

from __future__ import annotations

import json

import pytest

from benchmarks.memory import with_changes
from megatrain.checkpoint.peers import choose_keepers
from megatrain.checkpoint_format.manifest import CheckpointMesh, Manifest
from megatrain.comm import dry_mesh
from megatrain.config.config import Config
from megatrain.contracts.errors import CheckpointError
from megatrain.contracts.layout import Layout, axis_named
from megatrain.planning.plan_text import render
from megatrain.planning.run_plan import plan_run
from tests.helpers.checkpoint_tree import make_manifest

SMALL = {"model.vocab_size": 64, "model.seq_len": 32, "model.hidden_size": 32}
LAYOUT = Layout(pp_size=2, cp_size=2, tp_size=2, ep_size=4)


def test_a_rank_of_a_dry_run_has_a_group_along_every_axis() -> None:
    with dry_mesh(LAYOUT, 5) as mesh:
        assert {axis: group.ranks for axis, group in mesh.along.items()} == {
            axis: LAYOUT.ranks_along(5, axis) for axis in LAYOUT.axes
        }
        assert {axis: group.ranks for axis, group in mesh.cpu_groups.along.items()} == {
            axis: LAYOUT.ranks_along(5, axis) for axis in LAYOUT.axes
        }
        assert [group.name for group in mesh.cpu_groups.groups] == ["host-tp", "host-pp", "host-cp", "host-dp"]
        assert (mesh.stage, mesh.coordinate) == (1, {"pp": 1, "dp": 0, "cp": 0, "tp": 1, "edp": 0, "ep": 1})
        names = [group.name for group in mesh.groups if group.size > 1]
    assert names == [
        *("pp", "cp", "tp", "ep", "embedding", "host-pp", "host-cp", "host-tp", "host-ep", "pp-forward", "pp-backward")
    ]


def test_a_dry_run_lists_every_axis_and_every_group(monkeypatch: pytest.MonkeyPatch) -> None:
    # No option of [parallel] gives these sizes yet; the dry run supports them.
    monkeypatch.setattr(Config, "layout", lambda *_: LAYOUT)
    changes = {"parallel.pp_size": 2, "parallel.tp_size": 2}
    plan = plan_run(Config.from_dict(with_changes(SMALL | changes)))
    lines = [line.split() for line in render(plan).splitlines()]

    assert plan.to_dict()["layout"] == LAYOUT.sizes
    reported = {line[0]: line for line in lines if line and line[0] in LAYOUT.axes}
    assert list(reported) == list(LAYOUT.axes)
    for axis in LAYOUT.axes:
        assert [axis, axis_named(axis).title, f"{LAYOUT.size(axis)}", f"{LAYOUT.stride(axis)}"] in [
            line[:4] for line in lines
        ]
    groups = {group.name: group for group in plan.groups}
    assert groups.keys() >= {axis for axis in LAYOUT.axes if LAYOUT.size(axis) > 1}
    for name, group in groups.items():
        if name in LAYOUT.axes:
            assert (group.size, group.num_groups) == (LAYOUT.size(name), LAYOUT.world_size // LAYOUT.size(name))
        assert [name, f"{group.size}", f"{group.num_groups}"] in [line[:3] for line in lines]


def test_copies_lie_outside_of_the_groups_along_every_axis() -> None:
    layout = Layout(pp_size=2, cp_size=2, tp_size=2)
    host_of = [f"host-{rank // 2}" for rank in range(layout.world_size)]
    keepers = choose_keepers(layout, host_of)
    assert sorted(keepers) == list(range(8))
    for rank, keeper in enumerate(keepers):
        near = {host_of[member] for axis in layout.axes for member in layout.ranks_along(rank, axis)}
        assert host_of[keeper] not in near


def test_a_manifest_lists_the_axes_that_are_cut() -> None:
    manifest = make_manifest(mesh=CheckpointMesh(LAYOUT, num_chunks=1))
    raw = json.loads(manifest.to_json())
    assert raw["mesh"] == {"pp_size": 2, "dp_size": 1, "cp_size": 2, "tp_size": 2, "ep_size": 4, "num_chunks": 1}
    assert Manifest.from_json(json.dumps(raw), "m.json").mesh == manifest.mesh
    assert manifest.mesh.layout.sizes_text == "pp 2, dp 1, cp 2, tp 2, ep 4"
    with pytest.raises(CheckpointError, match=r"m\.json: mesh\.ep_size=3; ep_size = 3 must divide the 4 ranks"):
        Manifest.from_json(json.dumps({**raw, "mesh": {**raw["mesh"], "ep_size": 3}}), "m.json")
