"""Stock torchrun on our rendezvous: real agents, real workers, a real etcd, and faults of each.

Agents are forks that need not load torch; their workers are new interpreters.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from megatrain.checkpoint_format.commit import committed_steps
from megatrain.checkpoint_format.local_location import LocalLocation
from tests.helpers.etcd_server import EtcdServers, enable_users
from tests.helpers.processes import descendants
from tests.helpers.tiny_data import write_corpus
from tests.helpers.train_process import forked, make_job
from tests.helpers.training_case import TINY, on_layout
from tests.helpers.waiting import DEADLINE_S, DeadlineError, wait_until

STEPS = 60
WORKER = """
import json, os, pathlib, sys, threading
names = ("RANK", "WORLD_SIZE", "MEGATRAIN_ROUND", "MASTER_PORT")
pathlib.Path(sys.argv[1], str(os.getpid())).write_text(json.dumps({name: int(os.environ[name]) for name in names}))
while not pathlib.Path(sys.argv[1], "stop").exists():
    threading.Event().wait(0.05)
"""
"""A worker without peers: only the values that it got from the rendezvous can be checked."""


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    with EtcdServers(tmp_path_factory.mktemp("etcd")) as servers:
        yield servers


class Torchrun:
    """One agent and the options that all agents of a job share."""

    def __init__(self, words: list[str], output: Path, environment: Mapping[str, str] | None = None) -> None:
        self.output = output
        self._stack = ExitStack()
        self.process = self._stack.enter_context(forked(words, environment, output=output))

    @property
    def workers(self) -> set[int]:
        return set(descendants(self.process.pid))

    def die(self) -> None:
        """Kill the agent and all its workers, as a failure of its machine would."""
        os.kill(self.process.pid, signal.SIGSTOP)  # It must not start more workers.
        for pid in [self.process.pid, *self.workers]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(DEADLINE_S)

    def finish(self) -> int:
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise DeadlineError(f"torchrun has not ended:\n{self.output.read_text()}") from None

    def close(self) -> None:
        for pid in self.workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._stack.close()


@contextmanager
def torchruns(directory: Path, etcd: EtcdServers, nnodes: str, tail: list[str]) -> Iterator[Callable[..., Torchrun]]:
    """Yield a function that starts another agent; at the end all processes of all agents are gone."""
    agents: list[Torchrun] = []

    def start(*options: str, conf: str = "ttl=2,renew=0.5,last_call_timeout=1", **environment: str) -> Torchrun:
        words = ["torch.distributed.run", f"--nnodes={nnodes}", "--nproc-per-node=1", "--rdzv-backend=megatrain"]
        words += [f"--rdzv-endpoint={','.join(etcd.urls)}", f"--rdzv-id={directory.name}", f"--rdzv-conf={conf}"]
        output = directory / f"agent-{len(agents)}.log"
        agents.append(Torchrun([*words, "--max-restarts=3", *options, *tail], output, environment))
        return agents[-1]

    try:
        yield start
    finally:
        for agent in agents:
            agent.close()


class RoundNotes:
    """Notes that the living workers wrote."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()

    def living(self, *agents: Torchrun) -> list[dict[str, Any]]:
        """Return the notes of the living workers of some agents; empty unless each agent has one."""
        found = []
        for agent in agents:
            files = [self.directory / str(pid) for pid in agent.workers]
            texts = [file.read_text() for file in files if file.exists()]
            found += [json.loads(text) for text in texts if text]
        return found if len(found) == len(agents) else []

    def await_round(self, after: int, *agents: Torchrun) -> int:
        """Wait until these agents' workers form one round without others, newer than `after`; return its number."""

        def is_there() -> bool:
            notes = self.living(*agents)
            numbers = {note["MEGATRAIN_ROUND"] for note in notes}
            return (
                len(numbers) == 1
                and min(numbers) > after
                and len({note["MASTER_PORT"] for note in notes}) == 1
                and sorted(note["RANK"] for note in notes) == list(range(len(agents)))
                and {note["WORLD_SIZE"] for note in notes} == {len(agents)}
            )

        try:
            wait_until(is_there, f"a round after {after} of {len(agents)} agents")
        except TimeoutError:
            pytest.fail("\n".join([str(self.living(*agents)), *(agent.output.read_text() for agent in agents)]))
        return int(self.living(*agents)[0]["MEGATRAIN_ROUND"])


@pytest.mark.slow
def test_workers_and_agents_die_and_come(etcd: EtcdServers, tmp_path: Path) -> None:
    notes = RoundNotes(tmp_path / "notes")
    (tmp_path / "worker.py").write_text(WORKER)
    tail = [str(tmp_path / "worker.py"), str(notes.directory)]
    with torchruns(tmp_path, etcd, "2:3", tail) as start:
        one, other = start(), start()
        number = notes.await_round(0, one, other)

        (pid,) = one.workers
        os.kill(pid, signal.SIGKILL)
        number = notes.await_round(number, one, other)

        third = start()
        number = notes.await_round(number, one, other, third)

        # The first host of the round serves its store.
        (first,) = [agent for agent in (one, other, third) if notes.living(agent)[0]["RANK"] == 0]
        rest = [agent for agent in (one, other, third) if agent is not first]
        first.die()
        number = notes.await_round(number, *rest)

        # Stopped as a scheduler does it: its place is free at once, not only after its lease expires.
        rest[0].process.send_signal(signal.SIGTERM)
        assert rest[0].finish() != 0
        last = [rest[1], start()]
        notes.await_round(number, *last)

        (notes.directory / "stop").touch()
        assert [agent.finish() for agent in last] == [0, 0]
        for agent in last:
            assert "Traceback" not in agent.output.read_text()


@pytest.mark.slow
def test_dead_torchrun_agent_is_replaced_by_another(etcd: EtcdServers, tmp_path: Path) -> None:
    """The surviving agent counts a restart, the new agent counts none; their workers connect nevertheless."""
    corpus = write_corpus(tmp_path / "tokens", 4000, TINY["model"]["vocab_size"], seed=1)
    job = make_job(
        tmp_path / "job",
        {"data": {"train": str(corpus)}},
        on_layout(1, 1, 2),
        {"train": {"steps": STEPS}, "checkpoint": {"interval": 20, "save_at_end": True}},
    )
    with torchruns(tmp_path, etcd, "2", ["-m", "megatrain.train", str(job.config_file)]) as start:
        agents = [start(), start()]
        checkpoints = LocalLocation(job.files.checkpoints / "main")
        ended = lambda: any(agent.process.poll() is not None for agent in agents)  # noqa: E731
        wait_until(lambda: ended() or bool(committed_steps(checkpoints)), "a checkpoint")
        agents.pop().die()
        agents.append(start())

        output = "".join(f"{agent.finish()}\n{agent.output.read_text()}" for agent in agents)
        codes = [agent.process.returncode for agent in agents]

    assert "resumed at step " in output, output
    assert f"step {STEPS}/{STEPS} | loss" in output, output
    assert job.records("step")[-1]["step"] == STEPS
    assert codes == [0, 0]


def test_a_wrong_password_is_reported_with_the_etcd_message(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("battery staple")
    with EtcdServers(tmp_path) as guarded:
        enable_users(guarded.urls[0], "root password", {"bob": "correct horse"}, "/megatrain/")
        with torchruns(tmp_path, guarded, "1", [os.devnull]) as start:
            agent = start(conf=f"user=bob,password_file={tmp_path / 'password'}")
            assert agent.finish() == 1
    said = agent.output.read_text()
    assert "RendezvousConnectionError: --rdzv-backend=megatrain: etcd " in said
    assert "as user 'bob'" in said
    assert "battery staple" not in said
