"""Ranks whose hosts run as in training and whose GPUs are simulated: recorder, device timer, groups and links."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch

from megatrain.comm.channel import Channel
from megatrain.comm.device_stream import DeviceStreams
from megatrain.comm.exchange import ExchangeRunner, Pending
from megatrain.comm.group import Group
from megatrain.comm.group_plan import PlannedGroup
from megatrain.comm.nccl import NcclCommunicator
from megatrain.contracts.black_box.operations import Operation
from megatrain.contracts.black_box.reader import BlackBox, read_black_box
from megatrain.contracts.black_box.values import Identity
from megatrain.contracts.layout import Layout
from megatrain.run_files.run_directory import black_box_path
from megatrain.telemetry.recorder import Recorder, open_recorder
from megatrain.telemetry.timers import DeviceTimer
from tests.helpers.simulated_device import DeviceWork, SimulatedNccl, Simulation

MS = 1_000_000
LAUNCH_NS = 1_000 * MS
"""The time at which the hosts launch everything: they run far ahead of their devices."""
READ_NS = 9_000 * MS
"""The time at which the devices have finished."""
_ROWS = torch.zeros(8)
DURATIONS_MS = {"allreduce": 2.0, "all_gather": 3.0, "reduce_scatter": 5.0, "all_to_all": 4.0, "send": 1.0}


class SimulatedRank:
    """One rank of a simulation."""

    def __init__(self, simulation: Simulation, rank: int, layout: Layout, recorder: Recorder) -> None:
        self.rank, self.layout, self.recorder = rank, layout, recorder
        self.device = simulation.devices[rank]
        self._simulation = simulation
        self._runner = ExchangeRunner(recorder)
        self._streams = DeviceStreams(self.device.new_stream)

    def group(self, name: str, ranks: tuple[int, ...] = (0, 1)) -> Group:
        durations = {method: milliseconds * MS for method, milliseconds in DURATIONS_MS.items()}
        nccl = SimulatedNccl(self._simulation, name, ranks, self.rank, durations)
        # "dp" joins replicas, also in a layout with one rank along dp
        planned = PlannedGroup(name, ranks, axis=name.partition("-")[0], is_of_replicas=name == "dp")
        communicator = NcclCommunicator(self._runner, planned, nccl, timedelta(seconds=1), self._streams)
        number = self.recorder.add_group(name, ranks)
        return Group(name, ranks, ranks.index(self.rank), number, communicator)

    def channel(self, group: Group, source: int, target: int) -> Channel:
        peer = target if self.rank == source else source
        return Channel(group, peer, self.recorder.add_group(f"{group.name} {source}", (source, target)))

    def launch(self, name: str, milliseconds: float) -> DeviceWork:
        """Launch a kernel of no recorded operation."""
        return self.device.launch(name, milliseconds * MS)

    def compute(self, operation: Operation, milliseconds: float) -> None:
        with self.recorder.span(operation):
            self.launch(operation.value, milliseconds)


class BoxedRank(SimulatedRank):
    """A rank whose black box is in `directory`, in step 1. Its timer reads `now_ns` as the host's clock."""

    def __init__(self, simulation: Simulation, rank: int, layout: Layout, directory: Path) -> None:
        self.now_ns = LAUNCH_NS
        self.path = black_box_path(directory, "demo", "key", "main", 1, rank)
        identity = Identity("demo", "main", 1, rank, layout, 1, "here")
        timer = DeviceTimer(
            simulation.devices[rank].event, lambda: simulation.run(LAUNCH_NS), clock=lambda: self.now_ns
        )
        recorder = open_recorder(identity, directory=str(directory), run_key="key", num_records=256, timer=timer)
        recorder.set_step(1)
        super().__init__(simulation, rank, layout, recorder)

    def box(self) -> BlackBox:
        """Return the current records."""
        return read_black_box(self.path)


def receive(channel: Channel, operation: Operation, microbatch: int = 0) -> Pending:
    return channel.receive((8,), torch.float32, torch.device("cpu"), operation, chunk=0, microbatch=microbatch)


class SimulatedTraining:
    """The launches of a rank's host: steps of a pipeline with tensor and data parallelism."""

    def __init__(self, rank: SimulatedRank) -> None:
        self.one = rank
        self._stage = rank.layout.coordinate(rank.rank)["pp"]
        self._tp, self._dp, self._pp = (
            rank.group(name, _along(rank.layout, rank.rank, name)) for name in ("tp", "dp", "pp")
        )
        self._gathered: Pending | None = None
        self._links: tuple[Channel, Channel] | None = None
        if len(pair := self._pp.ranks) == 2:
            forward, backward = rank.group("pp-forward", pair), rank.group("pp-backward", pair)
            self._links = rank.channel(forward, *pair), rank.channel(backward, *reversed(pair))

    def step(self) -> None:
        """Launch a step of two micro-batches. The first forward waits for the gather of the previous step."""
        for microbatch in range(2):
            self._forward(microbatch)
        for microbatch in range(2):
            self._backward(microbatch)
        reduced = self._dp.reduce_scatter(_ROWS, Operation.GRADS_REDUCE_SCATTER)
        self.one.launch("norms", 0.5)
        reduced.wait()
        with self.one.recorder.span(Operation.CLIP):
            self.one.launch("clip", 0.5)
            for group, operation in ((self._tp, Operation.TP_ALL_REDUCE), (self._pp, Operation.PP_ALL_REDUCE)):
                group.all_reduce(_ROWS, operation).wait()
        self.one.compute(Operation.OPTIMIZER, 2.0)
        self._gathered = self._dp.all_gather(_ROWS, Operation.PARAMS_ALL_GATHER)

    def _forward(self, microbatch: int) -> None:
        if self._links is not None and self._stage == 1:
            receive(self._links[0], Operation.FORWARD_RECV, microbatch).wait()
        with self.one.recorder.span(Operation.FORWARD_COMPUTE, microbatch=microbatch):
            if self._gathered is not None:
                self._gathered.wait()
                self._gathered = None
            self._layer("forward")
        if self._links is not None and self._stage == 0:
            self._links[0].send(_ROWS, Operation.FORWARD_SEND, chunk=0, microbatch=microbatch)

    def _backward(self, microbatch: int) -> None:
        if self._links is not None and self._stage == 0:
            receive(self._links[1], Operation.BACKWARD_RECV, microbatch).wait()
        with self.one.recorder.span(Operation.BACKWARD_COMPUTE, microbatch=microbatch):
            self._layer("backward")
        if self._links is not None and self._stage == 1:
            self._links[1].send(_ROWS, Operation.BACKWARD_SEND, chunk=0, microbatch=microbatch)

    def _layer(self, name: str) -> None:
        gathered = self._tp.all_gather(_ROWS, Operation.TP_ALL_GATHER)
        self.one.launch(f"{name} before", 1.0)
        gathered.wait()
        self.one.launch(name, 4.0)
        self._tp.reduce_scatter(_ROWS, Operation.TP_REDUCE_SCATTER).wait()
        self.one.launch(f"{name} after", 1.0)


def _along(layout: Layout, rank: int, axis: str) -> tuple[int, ...]:
    """Return the ranks whose coordinates differ from this rank's along one axis only."""
    own = {name: at for name, at in layout.coordinate(rank).items() if name != axis}
    coordinates = {one: layout.coordinate(one) for one in range(layout.world_size)}
    return tuple(coordinate for coordinate, at in coordinates.items() if own.items() <= dict(at).items())
