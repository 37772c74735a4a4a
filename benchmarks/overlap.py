"""How much of the communication is overlapped with computation, with overlap off and on, on an artificially slow link.

Each rank is a process of one thread in its own network namespace. The links get the rate at which a step with overlap
off communicates half of its time. Off and on take turns in one run. A replay gives the ideal time
(benchmarks/overlap_ideal.py; without a pipeline benchmarks/overlap_trace.py). Two ranks really compute. With four, two
cores would measure the scheduler, so their compute is "paced": it waits until a stated time is over, as for a device
(benchmarks/overlap_pace.py). Where the buckets of a chunk start one after the other, each layer is paced, because a
wait of the whole chunk would let all buckets arrive at once. Needs root and the programs ip and tc.
Run alone on the machine: python -m benchmarks overlap [--write]
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.bars import Bar, at_least, at_most, must_hold
from benchmarks.overlap_cases import CASES, MODEL, SMALL, OverlapCase
from benchmarks.overlap_cost import cost_columns, measured_cost
from benchmarks.overlap_ideal import ideal_of_schedule, measured_computes, sent_by_schedule
from benchmarks.overlap_processes import MeasuredBlock, RankProcesses, start_rank
from benchmarks.overlap_trace import OverlapTrace, ideal_of_calls, sent_by_calls
from benchmarks.result import Result
from megatrain.config.config import Config
from megatrain.contracts.black_box.reader import read_black_box
from megatrain.contracts.black_box.values import Record
from megatrain_launcher.etcd.server import free_port
from tests.helpers.namespaces import HostNetwork

NETWORK = "train"
TRACED = "traced"
LOWEST, SHARE, HIGHEST = 0.46, 0.5, 0.54
"""The fraction of communication in a step with overlap off, when the link's rate is set."""
MIN_SHARE, MAX_SHARE = 0.45, 0.55
"""The same fraction over the whole run."""
STEADY = 0.1
"""The largest relative change of a step on free links in a valid run. Beyond it, the machine's speed has changed."""
MAX_MEASURES = 3
"""The largest number of measurements of a case. The first valid measurement ends them."""
NUM_TRIES = 6
NUM_FREE = 2
"""Blocks on unshaped links, before and after the measurement."""
BLOCK = 2
"""Steps of one side in a turn."""
MIN_TURNS, MAX_TURNS = 4, 6
MAX_ERROR = 0.01
"""Turns end when the standard error of on / off is at most this. It does not depend on how much is overlapped."""
BURST_KB, QUEUE = 32, "50ms"
PAYLOAD = 1448 / 1514
"""The fraction of payload in a full frame of TCP, of 1,514 bytes for tc: the rest are headers."""


def run() -> Result:
    """Measure every case."""
    rows = []
    for case in CASES:
        for number in range(1, MAX_MEASURES + 1):
            row = {**_measure(case), "measured": number}
            print(row, flush=True)
            if is_valid(row):
                break
        rows.append(row)
    return Result(
        name="overlap",
        title="Communication overlapped with computation, on a slow link",
        command="python -m benchmarks overlap --write",
        rows=rows,
        notes=[
            "hidden = (off - on) / (off - ideal); ideal: replayed, from durations with overlap off and the link's rate",
            "link: bytes of payload; a full frame, for which tc counts 1,514 bytes, carries 1,448",
            f"turns: {MIN_TURNS} to {MAX_TURNS}, until the standard error of on / off is at most {MAX_ERROR:.0%}",
            f"a block of a side has {BLOCK} steps, after one that is not counted; times are medians of blocks",
            "hidden, least, most: median and ends of the turns",
            "communication: 1 - (off on links as they are) / off",
            f"measured: up to {MAX_MEASURES} times, until communication is {MIN_SHARE} to {MAX_SHARE} of off and",
            f"steps on free links before and after differ by at most {STEADY:.0%}; overlap does not decide",
            "default chunks: parallel.num_chunks = 1 and parallel.bucket_size = 0; bucket: elements that close one",
            "DDP and FSDP2: our model, buckets and groups of layers, on torch; ratio of times, turn by turn",
            "FSDP2 overlaps by streams of a GPU: on the CPU only gathers are asynchronous, sums of gradients wait",
            "one thread a rank, a network namespace each, link shaped with tc tbf; fp32, gloo",
            "ideal: in pipelines from schedule and buckets, else from the calls of the side on, each awaited at once",
            "compare runs by on / off: hidden also depends on the ideal, and so on the share of communication",
            "the ideal has no latency; if links are busy for most of it, each loss of their rate is exposed",
            "latency, rate in steps: of exchanges that are awaited at once, a line through their median times by bytes",
            "on the rank that begins last; the ideals with them show how much of on - ideal is due to each",
            "paced: forward and backward of a chunk, with TP the products of branches, last until a set time is over",
            "paced by layer: so do forward and backward of each layer; gradients are written when its time is over",
        ],
        settings={"model": MODEL, "paced model": SMALL},
        bars=[bar for case, row in zip(CASES, rows, strict=True) for bar in bars_of(case, row)],
    )


def is_valid(row: Mapping[str, Any]) -> bool:
    """Return whether the machine's speed and the fraction of communication were steady, whatever was overlapped."""
    before, after = row["free link, ms"], row["free link after, ms"]
    is_steady = abs(after - before) <= STEADY * min(before, after)
    return is_steady and MIN_SHARE <= row["communication"] <= MAX_SHARE


def bars_of(case: OverlapCase, row: Mapping[str, Any]) -> list[Bar]:
    """Return the bars of a row: it is valid, enough communication is overlapped, and on / ideal is small enough."""
    hidden, of_ideal = case.wanted
    return [
        must_hold(f"{case.name}: the machine kept its pace, and communication its share of a step", is_valid(row)),
        at_least(f"{case.name}: hidden", row["hidden"], hidden),
        *([at_most(f"{case.name}: on / ideal", row["on / ideal"], of_ideal)] if of_ideal < math.inf else []),
    ]


def is_known(on: Sequence[float], off: Sequence[float]) -> bool:
    """Return whether these turns are enough: at least MIN_TURNS, as many in each order of the sides, and a standard
    error of the ratio on / off of at most MAX_ERROR."""
    if len(on) < MIN_TURNS or len(on) % 2:
        return False
    ratios = np.array(on) / np.array(off)
    return bool(ratios.std(ddof=1) / math.sqrt(len(ratios)) <= MAX_ERROR * ratios.mean())


@dataclass(frozen=True, slots=True)
class _Measured:
    """The measurements of a case.

    free_s, free_again_s: seconds of a step on unshaped links, before and after the turns. rate: bytes of payload a
    second that a shaped link carries. blocks: by side. records: of each rank's black box.
    """

    free_s: float
    free_again_s: float
    rate: float
    blocks: Mapping[str, Sequence[MeasuredBlock]]
    records: Sequence[Sequence[Record]]

    @property
    def traces(self) -> list[list[OverlapTrace]]:
        """The traced blocks of each rank; empty if the case is not traced."""
        traced = self.blocks.get(TRACED, ())
        return [[block.traces[rank] for block in traced] for rank in range(len(self.records))] if traced else []

    def steps(self, side: str) -> set[int]:
        return {step for block in self.blocks[side] for step in block.steps}


def _measure(case: OverlapCase) -> dict[str, Any]:
    config = Config.from_dict(case.tables(has_overlap=False))
    found = _run_ranks(case, config)
    cost = None
    if case.is_traced:
        ideal = ideal_of_calls(found.traces, found.rate) / BLOCK
        if len(found.records) in config.layout(None).sizes.values():  # all ranks are one group
            cost = measured_cost(found.records, found.steps(TRACED))
    else:
        off_steps = found.steps("off")
        computes = [measured_computes(of_rank, off_steps) for of_rank in found.records]
        ideal = ideal_of_schedule(config, computes, found.rate)
    return {**_row(case, config, found, ideal), **cost_columns(found.traces, cost, BLOCK)}


def _run_ranks(case: OverlapCase, config: Config) -> _Measured:
    """Start the ranks, shape their links, and let the sides take turns."""
    num_ranks = config.layout(None).world_size
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overlap-")))
        network = stack.enter_context(HostNetwork(num_ranks, (NETWORK,)))
        address = f"tcp://{network.address(NETWORK, 0)}:{free_port('127.0.0.1')}"
        shared = {
            "sides": {side: case.tables(has_overlap=side == "on") for side in ("off", "on")},
            "peers": list(case.peers), "world_size": num_ranks, "init_method": address, "directory": str(directory),
            "forward_s": case.forward_s, "product_s": case.product_s, "layer_s": case.layer_s,
        }  # fmt: skip
        processes = [
            stack.enter_context(start_rank(network, NETWORK, directory, rank, shared)) for rank in range(num_ranks)
        ]
        ranks = RankProcesses(directory, processes)
        for side in ("off", "on", *case.peers):
            ranks.block(side, 1)
        free = [ranks.block("off", BLOCK) for _ in range(NUM_FREE)]
        free_s = float(np.median([one.seconds for one in free]))
        if case.is_traced:
            sample = ranks.block("on", BLOCK, is_traced=True)
            num_bytes = sent_by_calls(sample.traces[0]) / len(sample.steps)
        else:
            num_bytes = sent_by_schedule(config)
        rate = PAYLOAD * _shape(ranks, network, num_bytes, free_s)
        blocks = _take_turns(ranks, case)
        for host in range(num_ranks):
            network.speed_up(host, NETWORK)
        free_again_s = float(np.median([ranks.block("off", BLOCK).seconds for _ in range(NUM_FREE)]))
        ranks.end()
        boxes = {box.identity.rank: box for box in map(read_black_box, sorted(directory.rglob("*rank*.blackbox")))}
    return _Measured(free_s, free_again_s, rate, blocks, [boxes[rank].records for rank in range(num_ranks)])


def _row(case: OverlapCase, config: Config, found: _Measured, ideal: float) -> dict[str, Any]:
    """Return the row of a case. ideal: seconds of a step."""
    seconds = {side: np.array([block.seconds for block in blocks]) for side, blocks in found.blocks.items()}
    if case.is_traced:
        print(f"on, each exchange awaited at once: {np.median(seconds[TRACED]) * 1e3:.0f} ms", flush=True)
    off, on = (float(np.median(seconds[side])) for side in ("off", "on"))
    hidden = (seconds["off"] - seconds["on"]) / (seconds["off"] - ideal)
    return {
        "case": case.name,
        "bucket": config.bucket_size(config.layout(None)) if config.parallel.dp_size > 1 else "-",
        "off, ms": off * 1e3,
        "on, ms": on * 1e3,
        "ideal, ms": ideal * 1e3,
        "free link, ms": found.free_s * 1e3,
        "free link after, ms": found.free_again_s * 1e3,
        "communication": 1.0 - (found.free_s + found.free_again_s) / 2.0 / off,
        "turns": len(hidden),
        "hidden": float(np.median(hidden)),
        "least": float(hidden.min()),
        "most": float(hidden.max()),
        "on / ideal": on / ideal,
        "DDP / on": _ratio(seconds, "DDP"),
        "FSDP2 / on": _ratio(seconds, "FSDP2"),
        "link, MB/s": found.rate / 1e6,
    }


def _ratio(seconds: Mapping[str, NDArray[np.float64]], peer: str) -> float | str:
    return float(np.median(seconds[peer] / seconds["on"])) if peer in seconds else "-"


def _shape(ranks: RankProcesses, network: HostNetwork, num_bytes: float, free: float) -> float:
    """Set the links to the rate at which half of a step with overlap off is communication. Return the rate, in bytes/s.

    num_bytes: sent by a rank in a step. free: seconds of a step on unshaped links.
    """
    rate = num_bytes / (free * SHARE / (1.0 - SHARE))
    for _ in range(NUM_TRIES):
        for host in range(network.num_hosts):
            network.slow_down(host, NETWORK, f"{int(rate * 8)}bit", BURST_KB, QUEUE)
        ranks.block("off", 1)
        off = ranks.block("off", BLOCK).seconds
        share = 1.0 - free / off
        print(f"at {rate / 1e6:.2f} MB/s off takes {off * 1e3:.0f} ms, {share:.2f} of it communication", flush=True)
        if LOWEST <= share <= HIGHEST:
            return rate
        # the time of communication is proportional to 1 / rate
        rate *= (off - free) / (free * SHARE / (1.0 - SHARE))
    raise AssertionError(f"no rate gives a step that is half communication; the last one was {rate / 1e6:.2f} MB/s")


def _take_turns(ranks: RankProcesses, case: OverlapCase) -> dict[str, list[MeasuredBlock]]:
    """Return the blocks by side, and the traced blocks of "on"."""
    sides = ["off", "on", *([TRACED] if case.is_traced else []), *case.peers]
    blocks: dict[str, list[MeasuredBlock]] = {side: [] for side in sides}
    for turn in range(MAX_TURNS):
        # alternating order, so that a drift of the machine affects all sides equally
        for side in sides[:: 1 if turn % 2 == 0 else -1]:
            is_traced = side == TRACED
            blocks[side].append(ranks.block("on" if is_traced else side, BLOCK, is_traced))
        if is_known(*([block.seconds for block in blocks[side]] for side in ("on", "off"))):
            break
    return blocks
