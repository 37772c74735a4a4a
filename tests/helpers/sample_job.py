"""`python -m tests.helpers.sample_job OUTPUT`: record the job that `make dashboard-sample` shows.

A real job under `megatrain launch`: four hosts with two ranks each (pp 2, dp 4), two spares, compute paced. It has the
faults of weeks of training: a host becomes slow and is evicted, a rank is killed, a rank stops and the job hangs. The
result is the run directory, which is small because the model is tiny.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from megatrain.cli import main
from megatrain.contracts.records.incident import Incident, IncidentKind, IncidentState
from megatrain.contracts.records.record import decode
from megatrain_diagnostics.events.roster import newest_round
from megatrain_diagnostics.events.tables import Ranks
from megatrain_diagnostics.store.compaction import compact
from megatrain_diagnostics.store.reader import StoredEvents
from megatrain_diagnostics.store.segments import not_superseded
from tests.helpers.closed_loop import ClosedLoop, closed_loop
from tests.helpers.paced_train import Slowness, StepPace
from tests.helpers.waiting import wait_until

NAME = "gpt-sample"
HOSTS = tuple(f"host-{number}" for number in range(6))
STEPS = 300
_NUM_TRAINING = 4
_SLOW_HOST, _KILLED_RANK, _STOPPED_RANK = "host-1", 5, 3
_SLOW_AT, _KILL_AT, _STOP_AT = 40, 130, 210
_PINNED = 160
_RESTART_COST_S = 10.0
"""The assumed cost of a restart before one was measured; an eviction must be worth it within the few steps of a
sample."""
_KEPT = ("config.toml", "events", "incidents", "checkpoints", "logs", "metrics", "diagnosis")


def record(output: Path) -> None:
    """Run the job, and leave its run directory in `output`, which must not exist yet.

    Nothing else may run meanwhile: a busy machine causes additional stragglers.
    """
    root = Path(tempfile.gettempdir()) / NAME
    root.mkdir()
    try:
        model = {"model": {"num_layers": 2, "hidden_size": 16, "num_heads": 2}}
        layout = {"parallel": {"pp_size": 2}, "checkpoint": {"interval": 80, "keep_last": 2}, "log": {"interval": 20}}
        sampling = {"diagnostics": {"sample_period": 20, "restart_cost_s": _RESTART_COST_S}}
        pace = StepPace(forward_s=0.02, backward_s=0.04, noise=0.02, seed=1)
        with closed_loop(
            root, model, layout, sampling, pace=pace, hosts=HOSTS, num_training=_NUM_TRAINING, steps=STEPS
        ) as loop:
            _let_things_go_wrong(loop)
            for host in HOSTS:
                loop.launched.finish(host)
            run = loop.launched.job.files.root
        compact(run / "events", 2**62)
        _tend_checkpoints(run)
        _keep(run, output)
    finally:
        shutil.rmtree(root)


def _let_things_go_wrong(loop: ClosedLoop) -> None:
    loop.launched.wait_for_step(_SLOW_AT)
    loop.pace.slow_down(Slowness("compute", _SLOW_HOST, 0, 2.0))
    _wait_for_recovery(loop, 1)
    loop.launched.wait_for_step(_KILL_AT)
    os.kill(_pid_of(loop, _KILLED_RANK), signal.SIGKILL)
    _wait_for_recovery(loop, 2)
    loop.launched.wait_for_step(_STOP_AT)
    os.kill(_pid_of(loop, _STOPPED_RANK), signal.SIGSTOP)
    _wait_for_recovery(loop, 3)


def _wait_for_recovery(loop: ClosedLoop, number: int) -> None:
    def recovered() -> list[Incident]:
        return [incident for incident in loop.view.incidents() if incident.state is IncidentState.RECOVERED]

    wait_until(lambda: len(recovered()) >= number, f"incident {number} to be over")


def _pid_of(loop: ClosedLoop, rank: int) -> int:
    """Return the process of a rank in the newest round, once a rank has reported it."""
    newest = max(one.number for one in loop.view.rounds())
    source = StoredEvents(loop.launched.job.files.events)
    wait_until(lambda: newest_round(source.read(Ranks)) == newest, f"ranks of round {newest}")
    ranks = source.read(Ranks)
    return int(ranks.pid[(ranks.round == newest) & (ranks.rank == rank)][0])


def _tend_checkpoints(run: Path) -> None:
    """Use the checkpoint commands as people do: verify the newest checkpoint, and pin one."""
    assert main(["ckpt", "verify", str(run), "--step", str(_PINNED)]) == 0
    assert main(["ckpt", "verify", str(run)]) == 0
    assert main(["ckpt", "pin", str(run), "--step", str(_PINNED), "--reason", "starting point of the evaluation"]) == 0


def _keep(run: Path, output: Path) -> None:
    """Copy the files that are shown: merged events, and only the black boxes of the hang."""
    hang = f"round-{_round_of_hang(run):06d}"
    boxes = [path for path in (run / "incidents").glob("round-*") if path.name != hang]
    segments = list((run / "events").rglob("*.parquet"))
    left_out = {*boxes, *(set(segments) - set(not_superseded(segments)))}

    def ignore(directory: str, names: list[str]) -> set[str]:
        return {
            name for name in names if name.endswith(".lock") or name == "lock" or Path(directory) / name in left_out
        }

    output.mkdir(parents=True)
    for name in _KEPT:
        if (run / name).is_dir():
            shutil.copytree(run / name, output / name, ignore=ignore)
        elif (run / name).exists():
            shutil.copy2(run / name, output / name)


def _round_of_hang(run: Path) -> int:
    found = [decode(Incident, path.read_bytes(), path.name) for path in (run / "incidents").glob("*.json")]
    return next(one.round for one in found if one.kind is IncidentKind.HANG)


if __name__ == "__main__":
    record(Path(sys.argv[1]))
