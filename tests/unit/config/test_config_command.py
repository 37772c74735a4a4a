"""Settings on the command line, and the subcommands `config show`, `config check` and `config reference`."""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
import types
from pathlib import Path

import pytest

from megatrain.cli import main
from megatrain.commands import config as command
from megatrain.config.config import Config
from megatrain.config.load import load_config
from megatrain.config.reference import reference_markdown
from megatrain.contracts.errors import ConfigError
from tests.helpers.source_tree import ROOT
from tests.unit.config.conftest import ProblemsOf

DEMO = str(ROOT / "configs" / "demo.toml")


def run(*arguments: str, overrides: tuple[str, ...] = ()) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments, argparse.Namespace(overrides=list(overrides))))


def test_show_prints_a_file_that_loads_again(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("--train.steps=7", "--job.name=other", "--profile.ranks=[0, 2]", "--profile.num_steps=3")
    assert run("show", str(small), overrides=overrides) == 0
    shown = Path("shown.toml")
    shown.write_text(capsys.readouterr().out)
    assert load_config(shown).config == load_config(small, overrides).config


def test_show_prints_origins_beside_the_values(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("show", str(small), "--origin", overrides=("--train.seed=7",))
    shown = capsys.readouterr().out
    lines = [tuple(line.split(maxsplit=4)) for line in shown.splitlines()]

    assert ("num_heads", "=", "20", "#", "small.toml:6") in lines
    assert ("seed", "=", "7", "#", "--train.seed on the command line") in lines
    assert ("tp_size", "=", "1", "#", "default") in lines
    assert "seed = 1234" not in shown
    assert Config.from_dict(tomllib.loads(shown)) == load_config(small, ["--train.seed=7"]).config


def test_show_prints_json(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("show", str(small), "--json", "--origin")
    shown = json.loads(capsys.readouterr().out)

    assert Config.from_dict(shown["config"]) == load_config(small).config
    assert shown["origins"]["model.num_heads"] == "small.toml:6"
    assert len(shown["config_hash"]) == 64


def test_check_sums_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run("check", DEMO, "--world-size", "8", overrides=("--model.num_layers=8", "--batch.global_batch_size=64")) == 0
    )
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]

    assert lines[0] == ["OK"]
    facts = dict(line for line in lines if len(line) == 2)
    assert facts["layout"] == "pp_size=2 dp_size=2 tp_size=2: 8 ranks"
    assert facts["pipeline"] == "interleaved, 2 chunks a stage, 2 layers a chunk"
    assert facts["batch"].endswith(", 4 micro-batches of 8 a pipeline")
    assert facts["bubble"].startswith("12.5% ")  # (2 - 1) / (2 * 4)


def test_check_prints_the_cost_of_unequal_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", DEMO, "--world-size", "8", overrides=("--batch.global_batch_size=72",)) == 0
    assert (
        ", 5 micro-batches of 8 a pipeline (10.0% of the slots are idle: 9 micro-batches for 2 replicas, 4 to 5 each)\n"
        in capsys.readouterr().out
    )


def test_check_names_the_batches_of_later_stages(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage = ("--data_stage.after_tokens=6400", "--data_stage.global_batch_size=50", "--parallel.dp_size=4")
    assert run("check", str(small), overrides=stage) == 0
    idle = "3.8% of the slots are idle: 50 micro-batches for 4 replicas, 12 to 13 each"
    assert (
        "12 micro-batches of 1 a pipeline; from token 6,400 on 50 sequences, 13 micro-batches a pipeline "
        f"({idle})\n" in capsys.readouterr().out
    )


def test_check_prints_the_layers_of_each_stage(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("check", str(small), overrides=("--parallel.pp_size=3", "--parallel.counts_head_as_layer=true"))
    assert "1f1b, 1 chunk a stage, 3 + 3 + 2 layers in the model's order\n" in capsys.readouterr().out


def test_check_prints_its_assumptions(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("check", str(small))
    assert "1 rank (dp_size follows the world size; 1 is assumed here)" in capsys.readouterr().out
    run("check", str(small), "--world-size=3")
    assert "dp_size=3 tp_size=1: 3 ranks\n" in capsys.readouterr().out


def test_check_raises_every_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        run("check", DEMO, "--world-size=6", overrides=("--model.num_heads=5", "--log.interval=0"))
    assert [problem.partition(" ")[0] for problem in caught.value.problems] == [
        "log.interval=0",
        "model.num_heads=5",
        "parallel.tp_size=2",
        "parallel.dp_size",
    ]


def test_impossible_world_size_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    for world_size in ("0", "x", "10000001"):
        with pytest.raises(SystemExit):
            run("check", DEMO, f"--world-size={world_size}")
        expected = f"argument --world-size: {world_size!r} is not a whole number from 1 to 10000000"
        assert expected in capsys.readouterr().err


def test_dry_run_gets_the_fixed_layout(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planning = types.ModuleType("megatrain.planning.plan_text")
    planning.dry_run = lambda config: f"plan of {config.parallel.dp_size} replicas"
    monkeypatch.setitem(sys.modules, "megatrain.planning", types.ModuleType("megatrain.planning"))
    monkeypatch.setitem(sys.modules, "megatrain.planning.plan_text", planning)

    assert run("check", str(small), "--world-size=3", "--dry-run") == 0
    assert "\nplan of 3 replicas\n" in capsys.readouterr().out


def test_reference_is_printed_or_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("reference") == 0
    assert capsys.readouterr().out == reference_markdown()
    assert run("reference", "--output", str(tmp_path / "config.md")) == 0
    assert (tmp_path / "config.md").read_text() == reference_markdown()


def test_reference_shows_the_values_of_a_run(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "reference", str(small), "--train.steps=7"]) == 0
    assert capsys.readouterr().out == reference_markdown(load_config(small, ["--train.steps=7"]))
    assert main(["config", "reference", str(small), "--train.steps=0"]) == 78


def test_reference_of_nothing_takes_no_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "reference", "--train.steps=7"]) == 2
    assert "--train.steps=7: name the CONFIG that it changes" in capsys.readouterr().err


def test_program_prints_problems_and_exits_78(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", str(small), "--model.num_head=3", "--parallel.tp_size", "3"]) == 78
    error = capsys.readouterr().err
    assert "1. model.num_head=3 is not a known key; did you mean model.num_heads? (--model.num_head on the" in error
    assert "parallel.tp_size=3 must divide" in error


def test_program_refuses_a_reference_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "reference", "--output", "/dev/null/config.md"]) == 1
    assert "cannot write --output=/dev/null/config.md: Not a directory; name a file" in capsys.readouterr().err


VALUES: list[tuple[list[str], str, str, object]] = [
    (["--train.steps=5"], "train", "steps", 5), (["--train.steps", "5"], "train", "steps", 5),
    (["--train.steps=5", "--train.steps=6"], "train", "steps", 6), (["--train.steps=1_000"], "train", "steps", 1000),
    (["--optimizer.lr=1e-4"], "optimizer", "lr", 1e-4), (["--optimizer.lr=2"], "optimizer", "lr", 2.0),
    (["--parallel.overlap=false"], "parallel", "overlap", False),
    (["--model.block=parallel"], "model", "block", "parallel"),
    (['--model.block="parallel"'], "model", "block", "parallel"), (["--job.name=1.5"], "job", "name", "1.5"),
    (["--job.name=true"], "job", "name", "true"), (["--data.train=a b=c"], "data", "train", "a b=c"),
    (["--data.train", "-x"], "data", "train", "-x"), (["--data.train="], "data", "train", ""),
    (["--data.train=1\nvalue2 = 2"], "data", "train", "1\nvalue2 = 2"),
    (["--profile.ranks=[0, 1]", "--profile.num_steps=1"], "profile", "ranks", (0, 1)),
    (["--parallel.zero_stage=2"], "parallel", "zero_stage", 2),
]  # fmt: skip


def test_value_of_an_override_has_the_type_of_its_key(small: Path) -> None:
    for overrides, section, key, expected in VALUES:
        value = getattr(getattr(load_config(small, overrides).config, section), key)
        assert value == expected, overrides
        assert type(value) is type(expected), overrides


MISTAKES = [
    (
        ["--model.num_head=3"],
        "model.num_head=3 is not a known key; did you mean model.num_heads? (--model.num_head on the command line)",
    ),
    (
        ["--train.steps=5\nseed = 1"],
        'train.steps="5\\nseed = 1" must be an integer, such as 8, not a string (--train.steps on the command line)',
    ),
    (
        ["--parallel.overlap=True"],
        'parallel.overlap="True" must be true or false, not a string (--parallel.overlap on the command line)',
    ),
    (["--parallel.overlap"], "--parallel.overlap has no value; write --parallel.overlap=VALUE (on the command line)"),
    (
        ["--train.steps", "--train.seed=1"],
        "--train.steps has no value; write --train.steps=VALUE (on the command line)",
    ),
    (
        ["--num-heads=3"],
        ("--num-heads=3 is not a setting of the form --section.key=value; did you mean --model.num_heads=3? "
         "(on the command line)"),
    ),
    (
        ["--tp_size", "3"],
        ("--tp_size is not a setting of the form --section.key=value; did you mean --parallel.tp_size=VALUE? "
         "(on the command line)"),
    ),
    (
        ["--cp-size", "2"],
        "--cp-size cannot be set: context parallelism is not implemented; leave cp_size out (on the command line)",
    ),
    (
        ["stray"],
        "stray is not a setting of the form --section.key=value; write --section.key=value (on the command line)",
    ),
]  # fmt: skip


def test_mistake_in_an_override_is_named(problems_of: ProblemsOf) -> None:
    for overrides, expected in MISTAKES:
        assert problems_of(*overrides) == (expected,)


def test_override_does_not_hide_a_mistake_in_the_file(small: Path, problems_of: ProblemsOf) -> None:
    text = small.read_text().replace("num_heads = 20", "num_heads = 'x'")
    assert problems_of("--model.num_heads=20", text=text) == (
        'model.num_heads="x" must be an integer, such as 8, not a string (small.toml:6)',
    )
