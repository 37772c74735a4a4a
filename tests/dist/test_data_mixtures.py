"""Mixtures of training data through the command: weights that change at a resume, and mixtures that are refused."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatrain.checkpoint_format.checkpoint_files import read_manifest
from megatrain.checkpoint_format.local_location import LocalLocation
from megatrain.checkpoint_format.sample_stream import MixtureStage, SampleStream
from megatrain.cli import main
from megatrain.config.config import Config
from megatrain.config.serialize import to_toml
from megatrain.contracts.exit_codes import ExitCode
from megatrain.contracts.process import ROLLBACK_VARIABLE
from megatrain.contracts.records.record import encode
from megatrain.contracts.records.rounds import Rollback
from megatrain.run_record import read_run
from tests.dist.restarts import place, step_place
from tests.helpers.forked_program import run_forked
from tests.helpers.ports import free_ports
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_data import write_corpus
from tests.helpers.train_command import run_command
from tests.helpers.training_case import make_config

BATCH = 8
SEQ_LEN = make_config().model.seq_len
VOCAB_SIZE = 61


class Mixed:
    """A run in a directory; its sources and steps differ between starts."""

    def __init__(self, pool: RankPool, root: Path) -> None:
        self.pool, self.root = pool, root
        self.stages: dict[str, dict[str, Any]] = {}
        self.prefixes = {
            name: write_corpus(root / name / "train", 3000 + 500 * seed, VOCAB_SIZE, seed)
            for seed, name in enumerate(("web", "code", "books"))
        }

    def write(self, steps: int, *sources: dict[str, Any]) -> Path:
        """Write the configuration; a source needs a name, other keys are optional. `self.stages`: other sections."""
        numbered = {
            "data_source" if number == 1 else f"data_source-{number}": {
                "path": str(self.prefixes[source["name"]]),
                **source,
            }
            for number, source in enumerate(sources, start=1)
        }
        common = make_config(
            {"data": {"train": ""}, "batch": {"global_batch_size": BATCH}, "train": {"steps": steps}},
            {"model": {"num_layers": 1}},
            # The learning rate does not depend on the step at which a run stops.
            {"optimizer": {"lr_warmup_steps": 0, "lr_decay_steps": 100}},
            {"checkpoint": {"interval": 1, "keep_last": 9}},
            place(self.root),
        )
        file = self.root / "config.toml"
        file.write_text(to_toml(Config.from_dict({**common.to_dict(), **numbered, **self.stages})))
        return file

    def train(self, steps: int, *sources: dict[str, Any]) -> tuple[int, str]:
        """Train until `steps`; return the exit code and what the command printed."""
        output = self.root / "output"
        code = run_command(self.pool, ["train", str(self.write(steps, *sources))], output)
        return code, output.read_text()

    def digests(self, step: int) -> list[str]:
        """Return the digests of the tensors of a checkpoint."""
        files = read_manifest(LocalLocation(step_place(self.root, step, "main"))).files
        return [entry.digest for _, entry in sorted(files.items()) if entry.digest.startswith("items-")]

    def sources_by_step(self) -> list[set[str]]:
        """Return, for each step, the names of the sources that have a loss."""
        (run_directory,) = {file.parents[1] for file in self.root.rglob("metrics.jsonl")}
        return [
            {one["name"] for one in found} for found in read_run(run_directory).metrics("step")["sources"].to_pylist()
        ]

    def stream(self, step: int, branch: str = "main") -> SampleStream:
        """Return the sample order that a checkpoint recorded."""
        return read_manifest(LocalLocation(step_place(self.root, step, branch))).data


@pytest.fixture
def mixed(rank_pool: RankPool, tmp_path: Path) -> Mixed:
    return Mixed(rank_pool, tmp_path)


def test_a_mixture_may_change_whenever_a_run_resumes(mixed: Mixed) -> None:
    web, code, books = ({"name": name} for name in ("web", "code", "books"))
    assert mixed.train(3, {**web, "weight": 0.75}, {**code, "weight": 0.25})[0] == ExitCode.OK
    assert mixed.stream(3).stages == (MixtureStage(0, (3, 1), SEQ_LEN),)

    exit_code, output = mixed.train(5, books, {**web, "weight": 3.0})
    assert exit_code == ExitCode.OK, output
    found = mixed.stream(5)
    assert [source.name for source in found.sources] == ["web", "code", "books"]
    assert found.stages == (MixtureStage(0, (3, 1), SEQ_LEN), MixtureStage(3 * BATCH, (3, 0, 1), SEQ_LEN))
    assert f"from sample {3 * BATCH} on, the mixture is web 75 %, books 25 %" in output
    assert "sources until step 5: web" in output

    # The directories of a source may move; a source that returns continues at its former position.
    moved = mixed.root / "elsewhere" / "train"
    shutil.copytree(mixed.root / "web", moved.parent)
    exit_code, output = mixed.train(6, {**books, "weight": 0.0}, code, {"name": "web", "path": str(moved)})
    assert exit_code == ExitCode.OK, output
    assert mixed.stream(6).stages[-1] == MixtureStage(5 * BATCH, (1, 1, 0), SEQ_LEN)

    # Each step has the losses of the sources of its own mixture.
    sources = mixed.sources_by_step()
    assert [set().union(*sources[first:end]) for first, end in ((0, 3), (3, 5), (5, 6))] == [
        {"web", "code"}, {"books", "web"}, {"code", "web"}
    ]  # fmt: skip

    exit_code, output = mixed.train(7, {**code, "weight": 2.0})
    assert exit_code == ExitCode.OK, output
    assert mixed.sources_by_step()[6:] == [set()]

    write_corpus(mixed.prefixes["code"], 3500, VOCAB_SIZE, seed=99)
    exit_code, output = mixed.train(8, code, {"name": "web", "path": str(moved)})
    assert exit_code == ExitCode.CHECKPOINT
    assert re.search(r"code had 3500 tokens with digest .*data\.accepted_digest=", output), output


def test_planned_stages_begin_at_their_tokens_after_any_stop(rank_pool: RankPool, tmp_path: Path) -> None:
    web, code = {"name": "web", "weight": 3.0}, {"name": "code"}
    runs = [Mixed(rank_pool, tmp_path / name) for name in ("stops", "does not stop")]
    for run in runs:
        run.stages = {
            # in the middle of a step, and at its beginning
            "data_stage": {"after_tokens": 11 * SEQ_LEN - 5, "weights": "code=1"},
            "data_stage-2": {"after_tokens": 3 * BATCH * SEQ_LEN, "weights": "code=1, web=1"},
        }
    for steps in (1, 3, 5):
        exit_code, output = runs[0].train(steps, web, code)
        assert exit_code == ExitCode.OK, output
    assert runs[1].train(5, web, code)[0] == ExitCode.OK

    stages = (
        MixtureStage(0, (3, 1), SEQ_LEN),
        MixtureStage(11, (0, 1), SEQ_LEN),
        MixtureStage(3 * BATCH, (1, 1), SEQ_LEN),
    )
    assert [run.stream(5).stages for run in runs] == [stages, stages]
    assert runs[0].digests(5) == runs[1].digests(5) != runs[1].digests(4)


def test_a_packed_run_resumes_in_the_same_samples(rank_pool: RankPool, tmp_path: Path) -> None:
    web, code = {"name": "web", "weight": 3.0}, {"name": "code"}
    runs = [Mixed(rank_pool, tmp_path / name) for name in ("stops", "does not stop")]
    for run in runs:
        run.stages = {"data": {"packing": "best_fit", "has_document_mask": True}}
    exit_code, output = runs[0].train(2, web, code)
    assert exit_code == ExitCode.DATA
    assert f"make it with `megatrain data pack {runs[0].prefixes['web']} --seq-len {SEQ_LEN}`" in output
    for prefix in (run.prefixes[name] for run in runs for name in ("web", "code")):
        assert main(["data", "pack", str(prefix), "--seq-len", str(SEQ_LEN)]) == ExitCode.OK
    for steps in (2, 4):
        exit_code, output = runs[0].train(steps, web, code)
        assert exit_code == ExitCode.OK, output
    assert runs[1].train(4, web, code)[0] == ExitCode.OK
    assert runs[0].digests(4) == runs[1].digests(4)
    assert runs[0].stream(4).packing == "best_fit"
    # Another packing gives other samples, so the cursor is invalid there.
    runs[0].stages = {"data": {"has_document_mask": True}}
    exit_code, output = runs[0].train(5, web, code)
    assert exit_code == ExitCode.CHECKPOINT
    assert "its sample order differs: data.packing was best_fit, and is none" in output


@pytest.mark.slow
def test_a_rollback_skips_samples_in_the_mixture_that_read_them(mixed: Mixed) -> None:
    """The job rolls back to a step before the sample at which the mixture changed."""
    web, code = {"name": "web"}, {"name": "code"}
    assert mixed.train(3, {**web, "weight": 3.0}, code)[0] == ExitCode.OK
    assert mixed.train(5, web, code)[0] == ExitCode.OK

    back = Rollback("incident-1", to_step=2, skip_from=3, skip_to=4)
    worker = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    worker |= {"MASTER_PORT": str(free_ports(1)[0]), ROLLBACK_VARIABLE: encode(back).decode()}
    words = ["-m", "megatrain", "train", str(mixed.write(5, web, code))]
    done = run_forked(words, environment={**os.environ, **worker})
    assert done.returncode == ExitCode.OK, done.stderr
    found = mixed.stream(5, branch="branch-0002")
    assert found.stages == (MixtureStage(0, (3, 1), SEQ_LEN), MixtureStage(3 * BATCH, (1, 1), SEQ_LEN))
    assert found.skipped == ((3 * BATCH, 5 * BATCH),)

    # The job died before the first checkpoint of the branch, and its next start has another plan.
    shutil.rmtree(step_place(mixed.root, 5, "main"))
    for step in (3, 4, 5):
        shutil.rmtree(step_place(mixed.root, step, "branch-0002"))
    exit_code, output = mixed.train(4, {**web, "weight": 2.0}, code)
    assert exit_code == ExitCode.OK, output
    again = mixed.stream(4, branch="branch-0002")
    assert again.stages == (*found.stages, MixtureStage(5 * BATCH, (2, 1), SEQ_LEN))
    assert again.skipped == found.skipped


def test_sources_that_cannot_be_read_as_asked_are_refused(mixed: Mixed) -> None:
    exit_code, output = mixed.train(4, {"name": "web", "max_epochs": 2.0}, {"name": "code"})
    assert exit_code == ExitCode.OK, output
    exit_code, output = mixed.train(500, {"name": "web", "max_epochs": 2.0}, {"name": "code"})
    assert exit_code == ExitCode.DATA
    assert re.search(r"data_source\.max_epochs=2: until its end the run would read web 1\d\.\d+ times", output), output

    mixed.prefixes["twin"] = mixed.prefixes["web"].with_name("twin")
    for suffix in (".bin", ".idx"):
        shutil.copy(mixed.prefixes["web"].with_suffix(suffix), mixed.prefixes["twin"].with_suffix(suffix))
    exit_code, output = mixed.train(6, {"name": "web"}, {"name": "twin"})
    assert exit_code == ExitCode.DATA
    assert re.search(r"data_source-2\.path='.*twin' has the same content as data_source\.path='.*train'", output), (
        output
    )


def test_a_dry_run_shows_what_is_read_of_each_source(mixed: Mixed, capsys: pytest.CaptureFixture[str]) -> None:
    config = mixed.write(512, {"name": "web", "weight": 3.0, "max_epochs": 9.0}, {"name": "code"})
    assert main(["config", "check", str(config), "--dry-run"]) == 0
    table = capsys.readouterr().out.partition("Training data of a new run until step 512\n")[2].splitlines()
    *rows, last = table
    assert [line.split() for line in rows] == [
        ["source", "tokens", "samples", "read", "share", "epochs", "at", "most"],
        ["web", "3,000", "3,072", "75.00%", "16.5", "9"],
        ["code", "3,500", "1,024", "25.00%", "4.72", "any"],
    ]
    assert last.startswith(
        "  THE RUN WOULD NOT START: data_source.max_epochs=9: until its end the run would read web 16"
    )

    # The second half of a run reads only the other source.
    half = 512 * BATCH * make_config().model.seq_len
    mixed.stages = {"data_stage": {"after_tokens": half, "weights": "code=2"}}
    config = mixed.write(1024, {"name": "web", "weight": 3.0}, {"name": "code"})
    assert main(["config", "check", str(config), "--dry-run"]) == 0
    rows = capsys.readouterr().out.partition("Training data of a new run until step 1,024\n")[2].splitlines()[1:]
    assert [line.split()[:4] for line in rows[:2]] == [
        ["web", "3,000", "3,072", "37.50%"],
        ["code", "3,500", "5,120", "62.50%"],
    ]
    assert rows[2:] == [f"  from token {half:,} on: code 100.00%"]
