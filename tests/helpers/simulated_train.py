"""`python -m tests.helpers.simulated_train CONFIG`: a worker whose host runs ahead of a simulated GPU, in real time.

It writes the black box that the trainer would write on a GPU: the host launches a step and continues, and waits for the
GPU at the end of the step. The GPUs of all ranks are simulated in each worker, so workers do not communicate. In each
of the first rounds a kernel of one rank hangs, as the environment defines (MEGATRAIN_HUNG_KERNELS: for each round rank,
step and kernel; commas between the rounds).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from megatrain.config.load import load_config
from megatrain.contracts.black_box.values import Identity
from megatrain.contracts.process import process_from_environment
from megatrain.run_files.run_directory import RunDirectory
from megatrain.telemetry.black_box_writer import BlackBoxWriter
from megatrain.telemetry.recorder import Recorder, open_recorder
from megatrain.telemetry.timers import DeviceTimer
from tests.helpers.simulated_device import NEVER, Simulation
from tests.helpers.simulated_ranks import SimulatedRank, SimulatedTraining
from tests.helpers.waiting import wait_until

VARIABLE = "MEGATRAIN_HUNG_KERNELS"
STEPS = 40


def main(config_file: str) -> int:
    config = load_config(Path(config_file)).config
    process = process_from_environment(os.environ)
    layout = config.layout(process.world_size)
    hung = dict(enumerate((one.split(" ", 2) for one in os.environ[VARIABLE].split(",")), start=1)).get(process.round)
    simulation = Simulation(process.world_size)
    for device in simulation.devices:
        device.now_ns = time.monotonic_ns
    own = simulation.devices[process.rank]
    identity = Identity(
        config.job.name, "main", process.round, process.rank, layout, os.getpid(), process.host or "here"
    )  # fmt: skip
    run = RunDirectory(Path(config.job.resolved_run_directory))
    run.create()
    recorder = open_recorder(
        identity, directory=config.telemetry.black_box_directory, run_key=run.key, num_records=4096,
        timer=DeviceTimer(own.event, lambda: simulation.run(time.monotonic_ns())),
    )  # fmt: skip
    ranks = [
        SimulatedTraining(
            SimulatedRank(
                simulation, rank, layout, recorder if rank == process.rank else Recorder(BlackBoxWriter.anonymous())
            )
        )
        for rank in range(process.world_size)
    ]
    for step in range(1, STEPS + 1):
        recorder.set_step(step)
        for one in ranks:
            one.step()
        if hung is not None and step == int(hung[1]):
            work = simulation.devices[int(hung[0])].all_work()
            next(one for one in work if one.name == hung[2] and one.begin_ns == NEVER).duration_ns = NEVER
        end = own.event()
        end.record()
        simulation.run(time.monotonic_ns())
        wait_until(end.query, "the end of the step", NEVER)
        recorder.complete_step()
        for device in simulation.devices:
            device.forget()
    recorder.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
