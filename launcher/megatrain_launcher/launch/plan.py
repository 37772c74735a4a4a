"""The plan of a launch, made from the command line, the configuration and the environment.

The whole configuration is checked here, before anything is started: for every number of hosts from MIN to MAX that the
driver might choose. Numbers of hosts that cannot train are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from megatrain.config.checks import check
from megatrain.config.config import Config
from megatrain.config.load import load_config
from megatrain.config.origin import ValueOrigin
from megatrain.contracts.errors import ConfigError
from megatrain.formatting import count_text
from megatrain_job.commands.etcd_flags import without_password
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_launcher.executor.settings import ExecutorSettings
from megatrain_launcher.health.context import Places
from megatrain_launcher.hosts.adapter import HostAdapter, HostFacts
from megatrain_launcher.hosts.address import address_towards, interface_address
from megatrain_launcher.hosts.kubernetes import KubernetesPlatform, is_kubernetes_pod
from megatrain_launcher.hosts.local import LocalPlatform
from megatrain_launcher.hosts.slurm import SlurmPlatform, is_slurm_task
from megatrain_launcher.launch.flags import DEFAULT_MODULE, LaunchFlags, check_name
from megatrain_launcher.launch.job_files import JobFiles
from megatrain_launcher.launch.machine import hardware_text, num_workers


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A launch that has passed all checks before the start."""

    flags: LaunchFlags
    config: Config
    facts: HostFacts
    platform: HostAdapter
    min_hosts: int
    max_hosts: int
    num_workers: int
    feasible_hosts: Mapping[int, float]
    """Numbers of hosts that can train, with the mean slots of a step (Dealing.max_slots)."""
    unfit_counts: Mapping[int, tuple[str, ...]]
    """Numbers of hosts that cannot train, with the reasons."""

    @property
    def is_alone(self) -> bool:
        """Whether all hosts run on this machine, with an etcd of the launch's own."""
        return self.flags.is_standalone or (self.total_hosts == 1 and not self.flags.etcd.endpoints)

    @property
    def total_hosts(self) -> int:
        return self.max_hosts + self.flags.spares

    @property
    def files(self) -> JobFiles:
        return JobFiles.of(self.config)

    def notes(self) -> list[str]:
        """Return notes for the user, to print before the start."""
        found = []
        if self.unfit_counts:
            counts = ", ".join(map(str, sorted(self.unfit_counts)))
            first = min(self.unfit_counts)
            why = self.unfit_counts[first][0]
            noun = "host" if counts == "1" else "hosts"
            found.append(f"{counts} {noun} cannot train with this configuration ({first}: {why})")
        if not self.config.telemetry.black_box_directory:
            most = self.config.recovery.restarts_without_progress
            found.append(
                'telemetry.black_box_directory="": without black boxes no hang is detected, no step is seen, and the '
                f"job stops after {count_text(most, 'restart')} in a row (recovery.restarts_without_progress)"
            )
        return found

    def executor_settings(
        self, etcd: EtcdSettings, environment: Mapping[str, str], *, launch_id: str, address: str
    ) -> ExecutorSettings:
        """Return the settings of this host's executor."""
        return ExecutorSettings(
            config=self.config,
            etcd=etcd,
            host=self.facts.host,
            address=address,
            num_workers=self.num_workers,
            min_hosts=self.min_hosts,
            max_hosts=self.max_hosts,
            feasible_hosts=self.feasible_hosts,
            launch_id=launch_id,
            module=self.flags.module,
            arguments=(str(self.flags.config), *self.flags.overrides),
            environment=without_password(environment),
            preload=self.flags.preload,
            labels=self.facts.labels,
            hardware=hardware_text(environment),
            tee=self.flags.tee,
            is_driver_candidate=self.flags.is_driver_candidate,
            is_daemon_candidate=self.flags.is_daemon_candidate,
            places=Places(kernel_log=Path(self.flags.kernel_log).absolute()) if self.flags.kernel_log else Places(),
            log_directory=Path(self.flags.log_dir).absolute() if self.flags.log_dir else None,
        )

    def address(self, etcd: EtcdSettings) -> str:
        """Return the address of this host for other hosts. Raises: ConfigError when that cannot be determined."""
        if self.flags.local_addr:
            return self.flags.local_addr
        if self.config.runtime.network_interface:
            return interface_address(self.config.runtime.network_interface)
        if self.facts.address:
            return self.facts.address
        return address_towards(etcd.endpoints[0])


def choose_platform(name: str, environment: Mapping[str, str]) -> HostAdapter:
    """Return the platform that --platform or the environment selects."""
    if name == "slurm" or (name == "auto" and is_slurm_task(environment)):
        return SlurmPlatform(environment)
    if name == "kubernetes" or (name == "auto" and is_kubernetes_pod(environment)):
        return KubernetesPlatform(environment)
    return LocalPlatform()


def make_plan(flags: LaunchFlags, environment: Mapping[str, str]) -> LaunchPlan:
    """Return the plan, after all checks that are possible without starting anything.

    Raises: ConfigError with all problems of one kind. The kinds, in order: the number of hosts, the configuration, the
    number of workers, the layouts, and last the host's name and the module.
    """
    platform = choose_platform("local" if flags.is_standalone else flags.platform, environment)
    facts = platform.facts()
    smallest, largest = _host_range(flags, facts)
    loaded = load_config(flags.config, flags.overrides, is_for_training=flags.module == DEFAULT_MODULE)
    workers = num_workers(flags.workers, loaded.config.runtime.device, environment)
    feasible, unfit = count_hosts(loaded.config, loaded.origins, smallest, largest, workers)
    problems: list[str] = []
    host = flags.host_id or facts.host
    check_name("--host-id", host, problems)
    if flags.module != DEFAULT_MODULE and (why_not := why_not_run(flags.module, Path.cwd())):
        problems.append(f"-m {flags.module}: {why_not}")
    if problems:
        raise ConfigError(problems)
    return LaunchPlan(
        flags=flags,
        config=loaded.config,
        facts=replace(facts, host=host, labels={**facts.labels, **flags.labels}),
        platform=platform,
        min_hosts=smallest,
        max_hosts=largest,
        num_workers=workers,
        feasible_hosts=feasible,
        unfit_counts=unfit,
    )


def count_hosts(
    config: Config, origins: Mapping[str, ValueOrigin], smallest: int, largest: int, workers: int
) -> tuple[dict[int, float], dict[int, tuple[str, ...]]]:
    """Return the numbers of hosts that can train, each with the mean slots of a step, and the problems of the others.

    The mean is over the steps of the run, as if the batch size had no ramp-up.

    Raises: ConfigError with the problems of `largest` if no number can train.
    """
    feasible: dict[int, float] = {}
    unfit: dict[int, tuple[str, ...]] = {}
    steps_of = config.batch_schedule.without_rampup.num_steps_by_size(config.train.steps)
    for count in range(smallest, largest + 1):
        problems = check(config, origins, count * workers)
        if problems:
            unfit[count] = tuple(problems)
        else:
            layout = config.layout(count * workers)
            slots = sum(steps * config.dealing(layout, size).max_slots for size, steps in steps_of.items())
            feasible[count] = slots / config.train.steps
    if not feasible:
        raise ConfigError(unfit[largest])
    return feasible, unfit


def _host_range(flags: LaunchFlags, facts: HostFacts) -> tuple[int, int]:
    if flags.min_hosts is not None and flags.max_hosts is not None:
        if facts.num_hosts and facts.num_hosts < flags.min_hosts:
            asked = f"--nnodes={flags.min_hosts}:{flags.max_hosts}"
            raise ConfigError(
                [f"{asked}, but this launch has {count_text(facts.num_hosts, 'host')}; request more hosts"]
            )
        return flags.min_hosts, flags.max_hosts
    if facts.num_hosts <= flags.spares and facts.num_hosts:
        problem = f"--spares={flags.spares} of {count_text(facts.num_hosts, 'host')} leave none to train"
        raise ConfigError([f"{problem}; request more hosts"])
    count = facts.num_hosts - flags.spares if facts.num_hosts else 1
    return count, count


def why_not_run(module: str, directory: Path) -> str:
    """Return why `python -m module`, started in `directory`, would not find its program; empty if it would."""
    top, *rest = module.split(".")
    spec = _find_top(top, directory) if top.isidentifier() else None
    name = top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            break
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations)
    if spec is None or name != module:
        return f"there is no module {module} in {directory} or in sys.path; run `python -m {module}` to see the error"
    places = spec.submodule_search_locations
    if places is not None and PathFinder.find_spec(f"{module}.__main__", places) is None:
        return f"is a package without a __main__.py; name the module in it that trains: -m {module}.NAME"
    return ""


def _find_top(name: str, directory: Path) -> ModuleSpec | None:
    found = PathFinder.find_spec(name, [str(directory), *sys.path])
    if found is not None:
        return found
    try:
        return find_spec(name)  # import hooks count too: editable installs have one
    except (ImportError, ValueError):
        return None
