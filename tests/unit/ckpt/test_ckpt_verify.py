"""`megatrain ckpt verify` and `diff`, and that commands on checkpoints load no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.verifications import VERIFIED_NAME, read_verifications
from megatrain.cli import main
from megatrain.config.config import Config
from tests.helpers.checkpoint_tree import manifest_path
from tests.helpers.saved_checkpoint import Ckpt, put_whole, whole_state, with_layout, write_as_job
from tests.helpers.source_tree import ROOT
from tests.helpers.training_case import make_config
from tests.helpers.waiting import DEADLINE_S

DATA = "r000002-rank-00000.distcp"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def test_damage_names_the_file(ckpt: Ckpt, run: Path) -> None:
    place = run / "checkpoints/main/step-000000020"
    assert "OK" in ckpt("verify", place)
    for path in (place / DATA, place / ".metadata"):
        content = path.read_bytes()
        for damage in (flip, cut, Path.unlink):
            damage(path)
            found = ckpt("verify", place, "--json", code=66)
            path.write_bytes(content)

            assert found["num_damaged"] == 1
            (result,) = found["checkpoints"]
            assert result["place"] == str(place)
            assert any(problem.startswith(str(path)) for problem in result["problems"]), damage
    assert "OK" in ckpt("verify", place)


def test_run_is_verified_by_the_checkpoint_it_resumes_from(ckpt: Ckpt, run: Path) -> None:
    flip(run / "checkpoints/main/step-000000040" / DATA)
    (found,) = ckpt("verify", run, "--json")["checkpoints"]
    assert found["place"].endswith("branch-0002/step-000000025")
    assert "DAMAGED" in ckpt("verify", run, "--branch", "main", code=66)


def test_skipped_checkpoints_are_noted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_whole(LocalLocation(run / "checkpoints/branch-0002"), 35)
    (run / "checkpoints/branch-0002/step-000000035/COMMIT").unlink()
    assert main(["ckpt", "verify", str(run)]) == 0
    reported = capsys.readouterr()
    assert "megatrain: note: branch-0002/step-000000035 is skipped: " in reported.err
    assert "branch-0002/step-000000025: OK" in reported.out


def test_all_verifies_every_committed_checkpoint(ckpt: Ckpt, run: Path) -> None:
    assert ckpt("verify", run, "--all", "--json")["num_damaged"] == 0
    flip(run / "checkpoints/main/step-000000010" / DATA)
    flip(run / "checkpoints/main/step-000000030/.metadata")
    (run / "checkpoints/main/step-000000040/COMMIT").unlink()

    found = ckpt("verify", run, "--all", "--json", code=66)["checkpoints"]

    assert {Path(one["place"]).name: bool(one["problems"]) for one in found} == {
        "step-000000010": True, "step-000000020": False, "step-000000030": True, "step-000000040": True,
        "step-000000025": False,
    }  # fmt: skip
    in_main = ckpt("verify", run / "checkpoints/main", "--all", "--json", code=66)
    assert len(in_main["checkpoints"]) == 4


def test_checkpoint_of_another_run_or_branch_is_named(ckpt: Ckpt, run: Path) -> None:
    main = LocalLocation(run / "checkpoints/main")
    foreign = put_whole(main, 50, job="other")
    (run / "checkpoints/branch-0002/step-000000025").rename(main.path / "step-000000025")

    found = ckpt("verify", run, "--all", "--json", code=66)["checkpoints"]

    problems = {Path(one["place"]).name: one["problems"] for one in found if one["problems"]}
    assert set(problems) == {"step-000000025", "step-000000050"}
    assert "branch='branch-0002', expected 'main'" in problems["step-000000025"][0]
    assert "job='other', expected 'demo'" in problems["step-000000050"][0]
    assert "OK" in ckpt("verify", foreign, "--job", "other")


def test_a_checkpoint_outside_of_a_run(ckpt: Ckpt, tmp_path: Path) -> None:
    place = put_whole(LocalLocation(tmp_path / "elsewhere"), 3)
    assert "OK" in ckpt("verify", place)
    assert "verify it without --all" in ckpt("verify", place, "--all", code=66)


def test_all_and_one_exclude_each_other(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in (("--step", "10"), ("--branch", "main")):
        assert main(["ckpt", "verify", str(run), "--all", *option]) == 2
        assert "--all takes neither --step nor --branch" in capsys.readouterr().err


def test_all_reports_a_checkpoint_that_has_lost_its_manifest(ckpt: Ckpt, run: Path) -> None:
    place = run / "checkpoints/main/step-000000010"
    lost = manifest_path(place)
    lost.unlink()

    found = ckpt("verify", run, "--all", "--json", code=66)

    (damaged,) = [result for result in found["checkpoints"] if result["problems"]]
    assert damaged["place"] == str(place)
    assert any(problem.startswith(str(lost)) for problem in damaged["problems"])


def test_result_is_stored_beside_the_checkpoints(ckpt: Ckpt, run: Path) -> None:
    flip(run / "checkpoints/main/step-000000010" / DATA)
    ckpt("verify", run, "--all", code=66)
    found = read_verifications(LocalLocation(run / "checkpoints"))
    assert DATA in found["main", 10].problem
    assert found["main", 20].problem == ""
    assert ("branch-0002", 25) in found
    before = found["main", 20].at_unix_s
    (listed,) = [one for one in ckpt("ls", run, "--json")["checkpoints"] if one["step"] == 10]
    assert (listed["state"], DATA in listed["verification"]["problem"]) == ("damaged", True)
    assert any(line.split()[1] == "damaged" and DATA in line for line in ckpt("ls", run).splitlines() if " 10 " in line)
    ckpt("verify", run / "checkpoints/main/step-000000020")
    assert read_verifications(LocalLocation(run / "checkpoints"))["main", 20].at_unix_s > before


def test_damaged_checkpoint_is_not_resumed_until_verified_whole(ckpt: Ckpt, run: Path) -> None:
    newest = run / "checkpoints/branch-0002/step-000000025"
    whole = (newest / DATA).read_bytes()
    flip(newest / DATA)
    assert ckpt("ls", run, "--json")["resume"]["step"] == 25, "sizes are right, and the content was not read"
    ckpt("verify", newest, code=66)
    found = ckpt("ls", run, "--json")["resume"]
    assert (found["step"], "`megatrain ckpt verify` found it damaged" in found["skipped"][0]) == (20, True)
    assert ckpt("inspect", run, "--json")["step"] == 20, "nor do other commands accept it"
    (newest / DATA).write_bytes(whole)
    ckpt("verify", newest)
    assert ckpt("ls", run, "--json")["resume"]["step"] == 25


def test_read_only_directory_gives_the_same_result(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / VERIFIED_NAME).mkdir()
    assert main(["ckpt", "verify", str(run)]) == 0
    reported = capsys.readouterr()
    assert "OK" in reported.out
    assert "the result was not stored" in reported.err
    assert main(["ckpt", "ls", str(run)]) == 0, "and checkpoints are listed nevertheless"


@pytest.fixture
def config() -> Config:
    return make_config()


def test_same_state_in_another_layout_differs_in_the_mesh_only(ckpt: Ckpt, config: Config, tmp_path: Path) -> None:
    state = whole_state(config)
    write_as_job(tmp_path / "a", with_layout(config, tp=2, dp=2), state)
    write_as_job(tmp_path / "b", with_layout(config, pp=2), state)

    found = ckpt("diff", tmp_path / "a", tmp_path / "b", "--tensors", "--json")

    assert {one["name"] for one in found["fields"]} == {
        "mesh.tp_size", "mesh.pp_size", "mesh.dp_size", "config_hash", "config.parallel.tp_size",
        "config.parallel.pp_size", "config.parallel.dp_size",
    }  # fmt: skip
    assert found["tensors"] == []
    assert (found["num_compared"], found["values"]) == (len(state), [])


@pytest.mark.slow(kept=["layout0"])
@pytest.mark.parametrize("layout", [{}, {"tp": 2}])
def test_values_that_differ_are_measured(ckpt: Ckpt, config: Config, tmp_path: Path, layout: dict[str, int]) -> None:
    state = whole_state(config)
    write_as_job(tmp_path / "a", config, state, max_item_bytes=2048)  # several items per tensor
    keys = [key for key in state if key.endswith("qkv.weight") and key.startswith("model.")][:2]
    state[keys[0]].view(-1)[5] += 0.5
    state[keys[0]].view(-1)[700] -= 0.25
    state[keys[1]].view(-1)[-1] = float("nan")
    write_as_job(tmp_path / "b", with_layout(config, **layout), state, step=9, max_item_bytes=2048)

    found = ckpt("diff", tmp_path / "a", tmp_path / "b", "--tensors", "--json")
    text = ckpt("diff", tmp_path / "a", tmp_path / "b", "--tensors")

    assert {"name": "step", "before": 7, "after": 9} in found["fields"]
    values = {one["key"]: one for one in found["values"]}
    assert set(values) == set(keys)
    assert values[keys[0]]["num_elements"] == 2
    assert values[keys[0]]["max_abs_difference"] == pytest.approx(0.5, abs=1e-6)
    assert values[keys[1]] == {"key": keys[1], "num_elements": 1, "max_abs_difference": None}
    assert "step: 7 -> 9" in text
    assert f"the values of 2 of {len(state)} tensors differ" in text
    assert f"{keys[0]}: 2 of" in text


def test_tensors_of_one_alone_and_of_other_shapes(ckpt: Ckpt, tmp_path: Path) -> None:
    branch = LocalLocation(tmp_path / "x")
    one, other = put_whole(branch, 1, torch.zeros(4, 2)), put_whole(branch, 2, torch.zeros(2, 4))
    (found,) = ckpt("diff", one, other, "--tensors", "--json")["tensors"]
    assert found == {"key": "model.word", "before": "float32 [4, 2]", "after": "float32 [2, 4]"}

    write_as_job(tmp_path / "job", make_config(), whole_state(make_config()))
    assert "model.word: only in A" in ckpt("diff", one, tmp_path / "job")


def test_moments_are_readable(ckpt: Ckpt, run: Path) -> None:
    later = put_whole(LocalLocation(run / "checkpoints/main"), 50, written_unix_s=1_790_000_060.5)
    text = ckpt("diff", run / "checkpoints/main/step-000000010", later)
    assert "written_unix_s: 2026-09-21 14:13:20 UTC -> 2026-09-21 14:14:20 UTC" in text


HEAVY = ["torch", "numpy", "safetensors", "transformers", "tokenizers"]
SCRIPT = f"""
import json, sys
from megatrain.cli import main
for arguments in json.loads(sys.argv[1]):
    code = main(["ckpt", *arguments])
    heavy = [name for name in {HEAVY} if name in sys.modules]
    print(json.dumps([arguments[0], code, heavy]), file=sys.stderr)
"""


def test_only_conversions_load_torch(run: Path) -> None:
    main = run / "checkpoints/main"
    lines = [
        ["ls", run], ["inspect", run, "--tensors"], ["verify", run, "--all"], ["pin", run], ["unpin", run],
        ["diff", main / "step-000000010", main / "step-000000020"],
        ["diff", main / "step-000000010", main / "step-000000010", "--tensors"],
        ["restore", run, "--step", "20"], ["prune", run, "--keep-last", "1", "--abandoned", "--yes"],
    ]  # fmt: skip
    arguments = json.dumps([[str(word) for word in line] for line in lines])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=DEADLINE_S,
        check=True,
    )
    assert [json.loads(line) for line in done.stderr.splitlines()] == [[line[0], 0, []] for line in lines]
