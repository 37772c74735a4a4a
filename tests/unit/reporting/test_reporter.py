"""The reporter: which steps get a line, its content, and that neither sinks nor a broken pipe stop a run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megatrain.checkpoint_format.claims import JobRound
from megatrain.config.config import Config
from megatrain.contracts.errors import FencedError
from megatrain.reporting import (
    EvaluationReport,
    Reporter,
    SourceReport,
    StepReport,
    ValidationSetReport,
    missing_packages,
)
from megatrain.run_files.run_directory import RunDirectory
from megatrain.telemetry.flops import training_flops_per_token
from tests.helpers.source_tree import ROOT
from tests.helpers.waiting import DEADLINE_S
from tests.unit.reporting.conftest import Clock, Stream

MakeReporter = Callable[..., Reporter]
MakeStep = Callable[..., StepReport]


def run(reporter: Reporter, clock: Clock, steps: list[StepReport]) -> None:
    for step in steps:
        clock.now += step.duration_s
        reporter.step(step)


def step_lines(stream: Stream) -> list[str]:
    return [line for line in stream.lines if line.startswith("step ")]


def records(run_directory: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_directory.metrics / "metrics.jsonl").read_text().splitlines()]


def test_first_every_third_and_last_step_have_a_line(
    make_reporter: MakeReporter, make_step: MakeStep, stream: Stream, clock: Clock
) -> None:
    with make_reporter() as reporter:
        run(reporter, clock, [make_step(step) for step in range(1, 11)])
    # Another start begins at step 5 and is stopped after step 8.
    with make_reporter() as reporter:
        run(reporter, clock, [make_step(step) for step in range(5, 9)])

    assert [line.split("/")[0] for line in step_lines(stream)] == [
        *("step 1", "step 3", "step 6", "step 9", "step 10"),
        *("step 5", "step 6", "step 8"),
    ]


def test_line_of_an_interval_has_all_figures(
    make_reporter: MakeReporter, make_step: MakeStep, make_config: Callable[..., Config], stream: Stream, clock: Clock
) -> None:
    with make_reporter(telemetry={"peak_tflops": 0.01}) as reporter:
        run(reporter, clock, [make_step(1)])
        run(
            reporter,
            clock,
            [
                make_step(2, loss=2.0, num_tokens=16000, global_batch_size=16, grad_norm=1.0, duration_s=1.0),
                make_step(3, lr=2e-4),
            ],
        )

    per_rank = 24000 / 3 / 4
    # Samples have 1,000 tokens, whatever the length of the model.
    flops = per_rank * training_flops_per_token(replace(make_config().model, seq_len=1000))
    # Loss by tokens: (2 * 16000 + 3 * 8000) / 24000; the gradient norm by steps.
    assert step_lines(stream)[1] == (
        f"step 3/10 | loss 2.3333 | grad norm 0.750 | lr 2.00e-04 | 8,000 tokens/s | 2,000 tokens/s/rank | "
        f"{flops / 1e12:.3g} TFLOP/s/rank | MFU {flops / 1e10:.1%} | 1,500.0 ms/step | data wait 250.0 ms | "
        f"mem 1.50 GiB | skipped 0 | consumed 24,000 tokens"
    )


def test_flops_of_an_interval_count_its_pictures(
    make_reporter: MakeReporter, make_step: MakeStep, make_config: Callable[..., Config], stream: Stream, clock: Clock
) -> None:
    model = {"picture_size": 16, "patch_size": 8}
    with make_reporter(model=model, data={"pictures": "drawn"}) as reporter:
        run(reporter, clock, [make_step(1), make_step(2, num_pictures=8), make_step(3, num_pictures=4)])

    sized = replace(make_config(model=model).model, seq_len=1000)
    # of the two steps of the interval, one has pictures in all samples, and one in half
    flops = 16000 / 4 / 4 * training_flops_per_token(sized, pictures_per_sample=0.75)
    assert f" | {flops / 1e12:.3g} TFLOP/s/rank | " in step_lines(stream)[1]


def test_the_formula_of_mfu_is_printed_once_if_a_peak_is_known(
    make_reporter: MakeReporter, make_step: MakeStep, stream: Stream, clock: Clock
) -> None:
    with make_reporter(telemetry={"peak_tflops": 5}) as reporter:
        run(reporter, clock, [make_step(step) for step in range(1, 11)])

    assert stream.lines[0] == "ranks: 4 (pp_size=1 dp_size=2 tp_size=2), each on cpu"
    assert stream.lines[1].startswith("FLOPs/token = ")
    assert stream.lines[1].endswith(
        "; MFU tokens/s/device * FLOPs/token / peak, peak = 5 TFLOP/s (telemetry.peak_tflops)"
    )
    assert stream.getvalue().count("FLOPs/token = ") == 1

    unknown = Stream()
    with make_reporter(unknown) as reporter:
        run(reporter, clock, [make_step(1)])
    assert "MFU not printed: no bf16 peak is known for cpu; set telemetry.peak_tflops" in unknown.lines[1]
    assert "MFU" not in step_lines(unknown)[0]


def test_stalls_between_steps_count_in_tokens_a_second_only(
    make_reporter: MakeReporter, make_step: MakeStep, stream: Stream, clock: Clock
) -> None:
    with make_reporter() as reporter:
        run(reporter, clock, [make_step(1), make_step(2)])
        clock.now += 60
        run(reporter, clock, [make_step(3)])

    first, second = step_lines(stream)
    assert "4,000 tokens/s | " in first
    assert "250 tokens/s | 62.5 tokens/s/rank" in second
    assert "2,000.0 ms/step" in second


def test_skipped_steps_are_counted_and_left_out_of_the_means(
    make_reporter: MakeReporter, make_step: MakeStep, stream: Stream, run_directory: RunDirectory, clock: Clock
) -> None:
    skipped = {"loss": math.nan, "grad_norm": math.inf, "is_skipped": True}
    with make_reporter() as reporter:
        run(reporter, clock, [make_step(1), make_step(2, num_skipped=1, **skipped), make_step(3, num_skipped=1)])
        run(reporter, clock, [make_step(step, num_skipped=step - 2, **skipped) for step in (4, 5, 6)])

    assert "loss 3.0000 | grad norm 0.500" in step_lines(stream)[1]
    assert "skipped 1" in step_lines(stream)[1]
    assert "loss nan | grad norm nan" in step_lines(stream)[2]
    assert "skipped 4" in step_lines(stream)[2]
    steps = [record for record in records(run_directory) if record["kind"] == "step"]
    assert (steps[1]["loss"], steps[1]["grad_norm"], steps[1]["is_skipped"]) == (None, None, True)


def test_an_interval_has_the_mean_of_each_source_over_its_tokens(
    make_reporter: MakeReporter, make_step: MakeStep, run_directory: RunDirectory, clock: Clock
) -> None:
    web, code = (SourceReport(name=name, loss=2.0, num_tokens=100) for name in ("web", "code"))
    steps = [
        # All samples of a source may be bad.
        make_step(2, num_replaced=2, sources=(web, replace(code, loss=math.nan, num_tokens=0, num_replaced=2))),
        make_step(3, sources=(replace(web, loss=5.0, num_tokens=50), code)),
    ]
    skipped = make_step(4, sources=(replace(web, loss=math.nan),), loss=math.nan, is_skipped=True)
    with make_reporter() as reporter:
        run(reporter, clock, [make_step(1), *steps, skipped])

    intervals = [record for record in records(run_directory) if record["kind"] == "interval"]
    means = [
        {"name": "web", "loss": 3.0, "num_tokens": 150, "num_replaced": 0},
        {"name": "code", "loss": 2.0, "num_tokens": 100, "num_replaced": 2},
    ]
    assert [interval["sources"] for interval in intervals] == [[], means, []]
    assert [interval["num_replaced"] for interval in intervals] == [0, 2, 0]


def test_evaluations_are_printed_and_stored(
    make_reporter: MakeReporter, stream: Stream, run_directory: RunDirectory
) -> None:
    web = ValidationSetReport(name="web", loss=2.0, num_tokens=12345, bits_per_byte=0.9)
    code = ValidationSetReport(name="code", loss=40.0, num_tokens=1, bits_per_byte=None)

    def report(step: int, total: ValidationSetReport, *sets: ValidationSetReport) -> EvaluationReport:
        return EvaluationReport(
            step=step,
            loss=total.loss,
            num_tokens=total.num_tokens,
            bits_per_byte=total.bits_per_byte,
            duration_s=1.25,
            sets=sets,
        )

    with make_reporter() as reporter:
        for one in (report(6, web, web), report(9, code, code), report(10, web, web, code)):
            reporter.evaluation(one)

    web_parts = "loss 2.0000 | perplexity 7.39 | 0.9000 bits/byte | 12,345 tokens"
    assert stream.lines[-5:] == [
        f"evaluation at step 6 | {web_parts} | 1.2 s",
        "evaluation at step 9 | loss 40.0000 | 1 tokens | 1.2 s",
        f"evaluation at step 10, 2 sets | {web_parts} | 1.2 s",
        f"evaluation at step 10, web | {web_parts}",
        "evaluation at step 10, code | loss 40.0000 | 1 tokens",
    ]
    assert [record["kind"] for record in records(run_directory)] == ["evaluation"] * 3
    assert [record["bits_per_byte"] for record in records(run_directory)] == [0.9, None, 0.9]
    assert [[one["name"] for one in record["sets"]] for record in records(run_directory)] == [
        ["web"],
        ["code"],
        ["web", "code"],
    ]


class BrokenStream(Stream):
    """A pipe whose reader has closed it."""

    def write(self, _text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_a_broken_stream_does_not_stop_the_run(
    make_reporter: MakeReporter, make_step: MakeStep, run_directory: RunDirectory, clock: Clock
) -> None:
    with make_reporter(BrokenStream()) as reporter:
        run(reporter, clock, [make_step(step) for step in range(1, 11)])

    assert [record["step"] for record in records(run_directory) if record["kind"] == "step"] == list(range(1, 11))


class FailingSink:
    """Fails while `is_full`."""

    name = "a full disk"
    is_full = True

    def __init__(self) -> None:
        self.steps: list[int] = []

    def write(self, report: StepReport) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")
        self.steps.append(report.step)

    def close(self) -> None:
        raise OSError(28, "No space left on device")


def test_a_failing_sink_is_named_once_and_tried_again(
    make_reporter: MakeReporter, make_step: MakeStep, stream: Stream, clock: Clock
) -> None:
    sink = FailingSink()
    reporter = make_reporter(open_sinks=lambda *_: [sink])
    run(reporter, clock, [make_step(1), make_step(2)])
    sink.is_full = False
    run(reporter, clock, [make_step(3)])
    reporter.close()
    reporter.close()

    assert [line for line in stream.lines if line.startswith("metrics: ")] == [
        "metrics: a full disk cannot be written ([Errno 28] No space left on device); training continues and retries",
        "metrics: a full disk is written again from step 3 on",
        "metrics: a full disk may lack the last records: [Errno 28] No space left on device",
    ]
    assert sink.steps == [3, 3]


def test_a_round_that_was_left_behind_writes_no_metrics(
    make_reporter: MakeReporter, make_step: MakeStep, run_directory: RunDirectory
) -> None:
    with run_directory.locked(JobRound("demo", 1)) as run_lock:
        reporter = make_reporter(check_run_lock=run_lock.check)
        reporter.step(make_step(1))
        written = records(run_directory)
        assert written
        with run_directory.locked(JobRound("demo", 2)):
            for write in (lambda: reporter.step(make_step(2)), reporter.close):
                with pytest.raises(FencedError, match="round 1 of demo is left over"):
                    write()
        assert records(run_directory) == written


def test_missing_packages_are_problems_with_a_hint(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(log={"has_tensorboard": True, "has_wandb": True})
    monkeypatch.setattr("megatrain.reporting.sinks.find_spec", lambda _: None)

    assert missing_packages(config.log) == [
        (
            "log.has_tensorboard=true needs the package tensorboard; pip install 'megatrain[tensorboard]', or set "
            "log.has_tensorboard=false"
        ),
        "log.has_wandb=true needs the package wandb; pip install 'megatrain[wandb]', or set log.has_wandb=false",
    ]
    assert missing_packages(make_config().log) == []


@pytest.mark.slow
def test_asking_for_missing_packages_loads_no_torch() -> None:
    script = "import megatrain.reporting, json, sys; print(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=DEADLINE_S, check=True
    )
    assert not {"torch", "numpy", "tensorboard", "wandb"} & set(json.loads(done.stdout))
