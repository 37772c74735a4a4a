"""Huge numbers are refused by name, and at once, however large they are."""

from __future__ import annotations

from tests.unit.config.conftest import ProblemsOf


def test_numbers_beyond_what_python_reads_are_refused(problems_of: ProblemsOf) -> None:
    for setting, rule in [
        ("optimizer.eps=1" + 400 * "0", "is too large; use a number below 1e308"),
        ("train.steps=0x1" + 9000 * "0", f"is too large; use a value of at most {2**31 - 1}"),
        # Python refuses this many digits or brackets, so these values are read as text.
        ("train.steps=1" + 5000 * "0", "must be an integer, such as 8, not a string"),
        ("profile.ranks=" + 3000 * "[", "must be a list of integers, such as [0, 8], not a string"),
    ]:
        (problem,) = problems_of(f"--{setting}")
        assert problem.endswith(f"... {rule} (--{setting.partition('=')[0]} on the command line)")


def test_a_file_beyond_what_python_reads_is_refused(problems_of: ProblemsOf) -> None:
    for value in ("1" + 5000 * "0", 3000 * "[" + 3000 * "]"):
        (problem,) = problems_of(text=f"[train]\nsteps = {value}\n")
        assert problem.startswith("cannot be read as TOML: ")
        assert problem.endswith("write shorter numbers and fewer brackets (small.toml)")


def test_the_largest_sizes_are_checked_at_once(problems_of: ProblemsOf) -> None:
    huge = ["--parallel.pp_size=9999999", "--parallel.num_chunks=9999999", "--parallel.schedule=interleaved"]
    sizes = ["--model.seq_len=10000000000", "--model.num_heads=999983", "--model.num_kv_heads=999979"]
    rampup = ["--batch.rampup_start=1", "--batch.rampup_increment=1", f"--batch.rampup_samples={2**53}"]
    problems = problems_of(*huge, *sizes, *rampup, "--batch.global_batch_size=100000000")
    assert [problem.partition("=")[0] for problem in problems] == [
        "model.num_kv_heads",
        "model.num_heads",
        "model.num_layers",
        "batch.global_batch_size",
    ]
