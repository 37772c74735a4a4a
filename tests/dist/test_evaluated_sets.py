"""Several validation sets with the command: its output and metrics, and what a resumed run reports about changes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli import main
from megatrain.config.serialize import to_toml
from megatrain.contracts.exit_codes import ExitCode
from megatrain.data.dataset import data_digest
from megatrain.data.indexed import IndexedDataset
from tests.dist.conftest import SEQ_LEN, VOCAB_SIZE, Tables
from tests.dist.restarts import place
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_data import write_corpus
from tests.helpers.train_command import run_command
from tests.helpers.training_case import make_config

SIZES = {"web": 3 * SEQ_LEN + 1, "code": SEQ_LEN + 1}


class Evaluated:
    """A run in a directory with the validation sets web and code; its steps differ between starts."""

    def __init__(self, pool: RankPool, root: Path, train_data: Tables) -> None:
        self.pool, self.root, self._train_data = pool, root, train_data
        self.prefixes = {
            name: write_corpus(root / name / "validation", size, VOCAB_SIZE, seed)
            for seed, (name, size) in enumerate(SIZES.items())
        }

    def write(self, steps: int) -> Path:
        """Write the configuration."""
        sections = [{"path": str(prefix), "name": name} for name, prefix in self.prefixes.items()]
        numbered = dict(zip(("validation_set", "validation_set-2"), sections, strict=True))
        config = make_config(
            self._train_data,
            numbered,
            {"model": {"num_layers": 1}},
            {"train": {"steps": steps}, "checkpoint": {"interval": 1}, "evaluation": {"num_samples": 2}},
            place(self.root),
        )
        file = self.root / "config.toml"
        file.write_text(to_toml(config))
        return file

    def train(self, steps: int) -> tuple[int, str]:
        """Train until `steps`; return the exit code and what the command printed."""
        output = self.root / "output"
        code = run_command(self.pool, ["train", str(self.write(steps))], output)
        return code, output.read_text()

    def evaluations(self) -> list[dict[str, Any]]:
        (file,) = self.root.rglob("metrics.jsonl")
        records = map(json.loads, file.read_text().splitlines())
        return [record for record in records if record["kind"] == "evaluation"]


@pytest.fixture
def evaluated(rank_pool: RankPool, tmp_path: Path, train_data: Tables) -> Evaluated:
    return Evaluated(rank_pool, tmp_path, train_data)


def test_each_set_has_its_loss_and_changes_are_noted(evaluated: Evaluated) -> None:
    exit_code, output = evaluated.train(3)
    assert exit_code == ExitCode.OK, output
    (record,) = evaluated.evaluations()
    web, code = record["sets"]
    assert [(one["name"], one["num_tokens"]) for one in (web, code)] == [("web", 2 * SEQ_LEN), ("code", SEQ_LEN)]
    assert record["num_tokens"] == 3 * SEQ_LEN
    assert math.isclose(record["loss"], (2 * web["loss"] + code["loss"]) / 3, rel_tol=1e-12)
    titles = [f"evaluation at step 3{name} | loss {one['loss']:.4f}" for name, one in (
        (", 2 sets", record), (", web", web), (", code", code),
    )]  # fmt: skip
    assert all(title in output for title in titles), output

    old = data_digest(IndexedDataset(evaluated.prefixes["code"]))
    write_corpus(evaluated.prefixes["code"], SIZES["code"], VOCAB_SIZE, seed=99)
    new = data_digest(IndexedDataset(evaluated.prefixes["code"]))
    exit_code, output = evaluated.train(4)
    assert exit_code == ExitCode.OK, output
    assert "resumed at step 3" in output
    assert f"changed since: the content of code (digest {old} -> {new}); losses of evaluations before and" in output
    assert "the content of web" not in output
    assert "tokenizers that cannot be compared" in output


def test_a_dry_run_shows_what_is_taken_of_each_set(evaluated: Evaluated, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["config", "check", str(evaluated.write(3)), "--dry-run"]
    assert main(command) == 0
    table = capsys.readouterr().out.partition("Validation sets\n")[2].splitlines()
    assert [line.split() for line in table] == [
        ["validation", "set", "tokens", "samples", "per", "evaluation"],
        ["web", str(SIZES["web"]), "2"],
        ["code", str(SIZES["code"]), "1"],
    ]

    Path(f"{evaluated.prefixes['code']}.bin").unlink()
    assert main(command) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Validation sets")]
    assert line.startswith("Validation sets: not checked, because they cannot be read here: ")
    assert "code/validation.bin" in line
