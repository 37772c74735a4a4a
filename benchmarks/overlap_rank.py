"""One rank of the overlap benchmark: the same job with overlap off and on, in turns, within one process.

benchmarks/overlap.py starts it in a network namespace: `python -m benchmarks.overlap_rank JOB.json`. It executes the
orders order-0.json, order-1.json ... that the benchmark writes to the job's directory, and answers each.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch

from benchmarks.overlap_pace import LayerPace, paced_forward, paced_products
from benchmarks.overlap_peers import PeerSide, join_world
from benchmarks.overlap_trace import traced
from megatrain.comm import Mesh, create_mesh, join, leave, open_rendezvous
from megatrain.config.config import Config
from megatrain.contracts.black_box.values import Identity
from megatrain.contracts.process import Process
from megatrain.model.transformer import Transformer
from megatrain.parallel.pipeline import PipelineChunk, PipelineInput
from megatrain.telemetry.recorder import Recorder, open_recorder
from megatrain.training.rank_model import RankModel, build_rank_model
from megatrain.training.step import train_step
from tests.helpers.waiting import wait_until

DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class OverlapJob:
    """The settings of a rank: the tables of the two sides, the kinds of peers, and the rank's place in the job."""

    sides: dict[str, dict[str, Any]]
    peers: list[str]
    rank: int
    world_size: int
    init_method: str
    directory: str
    """A directory that all ranks and the benchmark share."""
    forward_s: float = 0.0
    """Paced compute: the least time of a micro-batch's forward; its backward takes at least twice that."""
    product_s: float = 0.0
    """Paced compute: the least time of the product of one sequence chunk with one weight."""
    layer_s: float = 0.0
    """Paced compute: the least time of a layer's forward; its backward takes at least twice that."""


class OverlapSide:
    """The rank model of one configuration."""

    def __init__(self, config: Config, mesh: Mesh, recorder: Recorder) -> None:
        self.rank_model: RankModel = build_rank_model(config, mesh, recorder, torch.device("cpu"))
        self.rank_model.initialize()
        self.rank_model.set_training(True)
        self.inputs = _inputs(self.rank_model)
        self._recorder = recorder

    def block(self, numbers: Sequence[int], mark: Callable[[], None]) -> float:
        """Train these steps. Returns the mean seconds of all except the first; marks enclose the counted steps.

        The steps are in steady state: work in flight at the end of the uncounted first step counts, and work in flight
        at the end of the last one does not.
        """
        self.rank_model.mesh.barrier()
        self._step(numbers[0])
        mark()
        started = time.perf_counter()
        for number in numbers[1:]:
            self._step(number)
        seconds = time.perf_counter() - started
        mark()
        for chunk in self.rank_model.data_parallel:
            chunk.finish_gather()
        return seconds / (len(numbers) - 1)

    def _step(self, number: int) -> None:
        self._recorder.set_step(number)
        train_step(
            self.rank_model,
            self.rank_model.config.parallel.build_schedule(len(self.inputs)),
            self.inputs,
            num_label_tokens=sum(one.labels_SB.numel() for one in self.inputs),
            lr=1e-4,
            grad_clip=1.0,
            recorder=self._recorder,
        )
        self._recorder.complete_step()


def main() -> None:
    job = OverlapJob(**json.loads(Path(sys.argv[1]).read_text()))
    torch.set_num_threads(1)
    configs = {name: Config.from_dict(tables) for name, tables in job.sides.items()}
    first = next(iter(configs.values()))
    layout = first.layout(job.world_size)
    recorder = open_recorder(
        Identity("overlap", "main", 0, job.rank, layout, os.getpid(), f"host-{job.rank}"),
        directory=job.directory,
        run_key="overlap",
        num_records=1 << 18,
    )
    if job.peers:
        join_world(job.init_method, job.rank, job.world_size)
    else:
        process = Process(job.rank, job.world_size, 0, 1, 0, job.init_method)
        join(open_rendezvous(process, job="overlap", timeout_s=60.0))
    mesh = create_mesh(
        layout,
        job.rank,
        torch.device("cpu"),
        recorder,
        has_wrap_links=first.parallel.num_chunks > 1,
        holders=first.holders,
        has_sequence_chunks=first.parallel.num_sequence_chunks > 1,
    )
    sides: dict[str, OverlapSide | PeerSide] = {}
    paces = paced_products(job.product_s, first.parallel.num_sequence_chunks)
    with patch.object(PipelineChunk, "forward", paced_forward(job.forward_s)), paces:
        for name, config in configs.items():
            side = sides[name] = OverlapSide(config, mesh, recorder)
            if job.layer_s > 0.0:
                for chunk in side.rank_model.pipeline.chunks:
                    LayerPace(job.layer_s).attach(cast(Transformer, chunk.module))
        sides |= {kind: PeerSide(kind, first, side.inputs, mesh) for kind in job.peers}
        _obey(job, sides)
    mesh.barrier()
    leave()
    recorder.close(keep=True)


def _obey(job: OverlapJob, sides: dict[str, OverlapSide | PeerSide]) -> None:
    """Execute orders until the order to end."""
    directory, number_of_step, number = Path(job.directory), 0, 0
    while True:
        path = directory / f"order-{number}.json"
        wait_until(path.exists, f"order {number}", DEADLINE_S)
        order = json.loads(path.read_text())
        if order["what"] == "end":
            return
        steps = list(range(number_of_step, number_of_step + order["num_steps"]))
        with traced() if order["is_traced"] else nullcontext((None, lambda: None)) as (trace, mark):
            answer: dict[str, Any] = {"seconds": sides[order["side"]].block(steps, mark), "steps": steps}
        answer["trace"] = trace and trace.as_dict()
        number_of_step += len(steps)
        unfinished = directory / f".answer-{number}-{job.rank}"
        unfinished.write_text(json.dumps(answer))
        unfinished.rename(directory / f"answer-{number}-{job.rank}.json")
        number += 1


def _inputs(rank_model: RankModel) -> list[PipelineInput]:
    config, generator = rank_model.config, torch.Generator().manual_seed(rank_model.mesh.coordinate["dp"])
    size, length = config.batch.micro_batch_size, config.model.seq_len
    inputs = []
    for _ in range(config.num_microbatches(rank_model.mesh.layout)):
        tokens = torch.randint(0, config.model.vocab_size, (length + 1, size), generator=generator)
        inputs.append(rank_model.pipeline_input(tokens[:-1], tokens[1:], torch.arange(size), None))
    return inputs


if __name__ == "__main__":
    main()
