"""How much of the communication is hidden under computation: overlap off and on, on a link that is made slow.

Each rank is a process of one thread in a network namespace of its own; the links get the rate at which a step with
overlap off communicates half of its time. Off and on take turns in one run. What is possible at best is replayed
(benchmarks/overlap_ideal.py). Two ranks compute; four would measure the scheduler of two cores, so their forward and
backward wait until a stated time is over, as for a device: "paced". Needs root and the programs ip and tc.
Run alone on the machine: python -m benchmarks overlap [--write]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.overlap_ideal import ideal_seconds, measured_computes, sent_bytes
from benchmarks.result import Result
from megatrain.config.config import Config
from megatrain.contracts.black_box import read_black_box
from megatrain_launcher.etcd_process import free_ports
from tests.helpers.namespaces import HostNetwork
from tests.helpers.waiting import wait_until

NETWORK = "train"
LOWEST, SHARE, HIGHEST = 0.46, 0.5, 0.54
"""Part of a step with overlap off that is communication."""
NUM_TRIES = 6
BURST, QUEUE = "64kb", "50ms"
MODEL = {"vocab_size": 1024, "seq_len": 256, "hidden_size": 128, "num_layers": 8, "num_heads": 4, "norm": "rmsnorm",
         "mlp": "swiglu", "positions": "rope", "has_bias": False, "has_tied_head": False}  # fmt: skip
SMALL = {**MODEL, "vocab_size": 256}


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured. forward_s: of paced compute, else 0; wanted: the part that is to be hidden, and on / ideal."""

    name: str
    parallel: Mapping[str, Any]
    num_microbatches: int
    wanted: tuple[float, float]
    micro_batch_size: int = 16
    model: Mapping[str, Any] = field(default_factory=lambda: MODEL)
    forward_s: float = 0.0
    peers: Sequence[str] = ()
    block: int = 4
    num_blocks: int = 6


DP = {"num_chunks": 4, "schedule": "interleaved", "bucket_size": 1 << 18}
PP = {"dp_size": 1, "num_chunks": 2, "schedule": "interleaved", "bucket_size": 1 << 18}
CASES = [
    Case("DP, 2 ranks, 4 chunks", {"dp_size": 2, **DP}, 1, (0.8, 1.08), peers=("DDP", "FSDP2")),
    Case("DP, 4 ranks, 4 chunks, paced", {"dp_size": 4, **DP}, 1, (0.8, 1.08), 2, SMALL, 0.1),
    Case("PP, 2 stages, interleaved", {"pp_size": 2, **PP}, 8, (0.8, 1.10), 4, block=2),
    Case("PP, 4 stages, interleaved, paced", {"pp_size": 4, **PP}, 8, (0.8, 1.10), 2, SMALL, 0.06, block=2),
    Case(
        "DP 2 x PP 2, interleaved, paced", {**PP, "dp_size": 2, "pp_size": 2}, 4, (0.75, 9.9), 2, SMALL, 0.06, block=2
    ),
]


def run() -> Result:
    """Measure every case."""
    rows = []
    for case in CASES:
        rows.append(_measure(case))
        print(rows[-1], flush=True)
    return Result(
        name="overlap",
        title="Communication hidden under computation, on a slow link",
        command="python -m benchmarks overlap --write",
        rows=rows,
        notes=[
            "hidden = (off - on) / (off - ideal); ideal: replayed, from durations with overlap off and the link's rate",
            "wanted: hidden at least, and on / ideal at most (9.9: no bound)",
            "medians of 6 blocks a side, taking turns; spread of on: (largest - smallest) / median",
            "one thread a rank, a network namespace each, link shaped with tc tbf; fp32, gloo",
            "paced: forward and backward of a chunk compute on small tensors and wait until a stated time is over",
        ],
        settings={"model": MODEL, "paced model": SMALL},
    )


class _Ranks:
    """The processes of a case, which carry out one order after another."""

    def __init__(self, directory: Path, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._directory = directory
        self._processes = processes
        self._number = 0

    def order(self, **what: Any) -> list[dict[str, Any]]:
        """Have all ranks do something; return their answers by rank."""
        number = self._tell(what)
        wanted = [self._directory / f"answer-{number}-{rank}.json" for rank in range(len(self._processes))]

        def are_there() -> bool:
            dead = [rank for rank, process in enumerate(self._processes) if process.poll() is not None]
            assert not dead, f"rank {dead[0]} of the benchmark has died"
            return all(path.exists() for path in wanted)

        wait_until(are_there, f"order {number}, {what}", 600.0)
        return [json.loads(path.read_text()) for path in wanted]

    def end(self) -> None:
        """Let the processes end, so that what they recorded is whole."""
        self._tell({"what": "end"})
        for process in self._processes:
            assert process.wait(timeout=60.0) == 0

    def block(self, side: str, num_steps: int) -> tuple[float, list[int]]:
        """Return the seconds of a step, and the numbers of the steps."""
        answers = self.order(what="block", side=side, num_steps=num_steps)
        return max(one["seconds"] for one in answers), answers[0]["steps"]

    def _tell(self, what: Mapping[str, Any]) -> int:
        number, self._number = self._number, self._number + 1
        unfinished = self._directory / f".order-{number}"
        unfinished.write_text(json.dumps(what))
        unfinished.rename(self._directory / f"order-{number}.json")
        return number


def _measure(case: Case) -> dict[str, Any]:
    tables = {
        side: {
            "model": case.model,
            "parallel": {**case.parallel, "overlap": side == "on"},
            "batch": {
                "micro_batch_size": case.micro_batch_size,
                "global_batch_size": case.num_microbatches * case.micro_batch_size * case.parallel.get("dp_size", 1),
            },
            "train": {"steps": 1, "precision": "fp32"},
            "optimizer": {"lr": 1e-4},
            "runtime": {"device": "cpu"},
        }
        for side in ("off", "on")
    }
    config = Config.from_dict(tables["off"])
    num_ranks = config.layout(None).world_size
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overlap-")))
        network = stack.enter_context(HostNetwork(num_ranks, (NETWORK,)))
        address = f"tcp://{network.address(NETWORK, 0)}:{free_ports(1)[0]}"
        shared = {
            "sides": tables, "peers": list(case.peers), "world_size": num_ranks, "init_method": address,
            "directory": str(directory), "forward_s": case.forward_s,
        }  # fmt: skip
        processes = [stack.enter_context(_start(network, directory, rank, shared)) for rank in range(num_ranks)]
        ranks = _Ranks(directory, processes)
        for side in ("off", "on", *case.peers):
            ranks.block(side, 2)
        free, _ = ranks.block("off", case.block)
        off_share = _shape(ranks, network, config, free, case.block)
        rate = float(np.median([one["rate"] for one in ranks.order(what="rate")]))
        seconds, off_steps = _take_turns(ranks, case)
        ranks.end()
        boxes = {box.identity.rank: box for box in map(read_black_box, sorted(directory.rglob("*rank*.blackbox")))}
        computes = [measured_computes(boxes[rank].records, off_steps) for rank in range(num_ranks)]
    ideal = ideal_seconds(config, computes, rate)
    off, on = (float(np.median(seconds[side])) for side in ("off", "on"))
    return {
        "case": case.name,
        "off, ms": off * 1e3,
        "on, ms": on * 1e3,
        "ideal, ms": ideal * 1e3,
        "free link, ms": free * 1e3,
        "communication": 1.0 - free / off,
        "hidden": (off - on) / (off - ideal),
        "wanted": f"{case.wanted[0]:g}, {case.wanted[1]:g}",
        "on / ideal": on / ideal,
        "spread": float(np.ptp(seconds["on"]) / on),
        "DDP / on": _ratio(seconds, "DDP"),
        "FSDP2 / on": _ratio(seconds, "FSDP2"),
        "link, MB/s": rate / 1e6,
        "share when shaped": off_share,
    }


def _ratio(seconds: Mapping[str, list[float]], peer: str) -> float | str:
    return float(np.median(np.array(seconds[peer]) / np.array(seconds["on"]))) if peer in seconds else "-"


def _shape(ranks: _Ranks, network: HostNetwork, config: Config, free: float, num_steps: int) -> float:
    """Give the links the rate at which half of a step with overlap off is communication. Returns the part."""
    chunk_bytes, message_bytes = sent_bytes(config)
    num_bytes = 2 * sum(chunk_bytes.values()) / config.parallel.pp_size
    if config.parallel.pp_size > 1:
        num_bytes += 2 * message_bytes * config.num_microbatches(config.parallel.dp_size) * config.parallel.num_chunks
    rate = num_bytes / (free * SHARE / (1.0 - SHARE))
    for _ in range(NUM_TRIES):
        for host in range(network.num_hosts):
            network.slow_down(host, NETWORK, f"{int(rate * 8)}bit", BURST, QUEUE)
        ranks.block("off", 1)
        off, _ = ranks.block("off", num_steps)
        share = 1.0 - free / off
        print(f"at {rate / 1e6:.2f} MB/s off takes {off * 1e3:.0f} ms, {share:.2f} of it communication", flush=True)
        if LOWEST <= share <= HIGHEST:
            return share
        # what is communicated takes a time that goes with 1 / rate
        rate *= (off - free) / (free * SHARE / (1.0 - SHARE))
    raise AssertionError(f"no rate gives a step that is half communication; the last one was {rate / 1e6:.2f} MB/s")


def _take_turns(ranks: _Ranks, case: Case) -> tuple[dict[str, list[float]], set[int]]:
    """Return the seconds of a step by side, and the numbers of the steps with overlap off."""
    sides = ["off", "on", *case.peers]
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    off_steps: set[int] = set()
    for turn in range(case.num_blocks):
        # there and back: a drift of the machine meets all alike
        for side in sides[:: 1 if turn % 2 == 0 else -1]:
            found, steps = ranks.block(side, case.block)
            seconds[side].append(found)
            off_steps |= set(steps) if side == "off" else set()
    return seconds, off_steps


def _start(network: HostNetwork, directory: Path, rank: int, shared: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    path = directory / f"job-{rank}.json"
    path.write_text(json.dumps({**shared, "rank": rank}))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": NETWORK}
    command = [*network.enter(rank), sys.executable, "-m", "benchmarks.overlap_rank", str(path)]
    return _Killed(command, env=environment)


class _Killed(subprocess.Popen[bytes]):
    """A process that does not outlive its block."""

    def __exit__(self, *error: object) -> None:
        self.kill()
        super().__exit__(*error)
