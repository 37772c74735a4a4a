"""Settings on the command line."""

from __future__ import annotations

from pathlib import Path

from megatrain.config import load_config
from tests.unit.config.conftest import ProblemsOf

VALUES: list[tuple[list[str], str, str, object]] = [
    (["--train.steps=5"], "train", "steps", 5),
    (["--train.steps", "5"], "train", "steps", 5),
    (["--train.steps=5", "--train.steps=6"], "train", "steps", 6),
    (["--train.steps=1_000"], "train", "steps", 1000),
    (["--optimizer.lr=1e-4"], "optimizer", "lr", 1e-4),
    (["--optimizer.lr=2"], "optimizer", "lr", 2.0),
    (["--parallel.overlap=false"], "parallel", "overlap", False),
    (["--model.block=parallel"], "model", "block", "parallel"),
    (['--model.block="parallel"'], "model", "block", "parallel"),
    (["--job.name=1.5"], "job", "name", "1.5"),
    (["--job.name=true"], "job", "name", "true"),
    (["--data.train=a b=c"], "data", "train", "a b=c"),
    (["--data.train", "-x"], "data", "train", "-x"),
    (["--data.train="], "data", "train", ""),
    (["--data.train=1\nvalue2 = 2"], "data", "train", "1\nvalue2 = 2"),
    (["--profile.ranks=[0, 1]", "--profile.num_steps=1"], "profile", "ranks", (0, 1)),
    (["--parallel.zero_stage=2"], "parallel", "zero_stage", 2),
]


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
        ["--modle.num_heads=20"],
        "[modle] is not a known section; did you mean [model]? (--modle.num_heads on the command line)",
    ),
    (
        ["--train.steps=ten"],
        'train.steps="ten" must be an integer, such as 8, not a string (--train.steps on the command line)',
    ),
    (
        ["--train.steps=5\nseed = 1"],
        ('train.steps="5\\nseed = 1" must be an integer, such as 8, not a string (--train.steps on the command line)'),
    ),
    (
        ["--parallel.overlap=True"],
        'parallel.overlap="True" must be true or false, not a string (--parallel.overlap on the command line)',
    ),
    (
        ["--parallel.overlap"],
        "--parallel.overlap has no value; write --parallel.overlap=VALUE (on the command line)",
    ),
    (
        ["--train.steps", "--train.seed=1"],
        "--train.steps has no value; write --train.steps=VALUE (on the command line)",
    ),
    (
        ["--num-heads=3"],
        (
            "--num-heads=3 is not a setting of the form --section.key=value; did you mean --model.num_heads=3? "
            "(on the command line)"
        ),
    ),
    (
        ["--tp_size", "3"],
        (
            "--tp_size is not a setting of the form --section.key=value; did you mean --parallel.tp_size=VALUE? "
            "(on the command line)"
        ),
    ),
    (
        ["--parallel.cp_size=2"],
        (
            "parallel.cp_size=2 cannot be set: context parallelism is not implemented; leave cp_size out "
            "(--parallel.cp_size on the command line)"
        ),
    ),
    (
        ["--parallel.ep_size", "4"],
        (
            "parallel.ep_size=4 cannot be set: expert parallelism is not implemented; leave ep_size out "
            "(--parallel.ep_size on the command line)"
        ),
    ),
    (
        ["--cp-size", "2"],
        "--cp-size cannot be set: context parallelism is not implemented; leave cp_size out (on the command line)",
    ),
    (
        ["stray"],
        "stray is not a setting of the form --section.key=value; write --section.key=value (on the command line)",
    ),
]


def test_mistake_in_an_override_is_named(problems_of: ProblemsOf) -> None:
    for overrides, expected in MISTAKES:
        assert problems_of(*overrides) == (expected,)


def test_override_does_not_hide_a_mistake_in_the_file(small: Path, problems_of: ProblemsOf) -> None:
    text = small.read_text().replace("num_heads = 20", "num_heads = 'x'")
    assert problems_of("--model.num_heads=20", text=text) == (
        'model.num_heads="x" must be an integer, such as 8, not a string (small.toml:6)',
    )
