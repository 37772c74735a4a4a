"""The consequences of the command line: numbers of hosts that can train, workers, and the identity of this host."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.contracts.errors import ConfigError
from megatrain_job.commands.etcd_flags import EtcdFlags
from megatrain_job.coordination.settings import EtcdSettings
from megatrain_launcher.executor.settings import new_session
from megatrain_launcher.hosts.address import interface_address, resolve
from megatrain_launcher.hosts.kubernetes import KubernetesPlatform
from megatrain_launcher.hosts.local import LocalPlatform, host_name
from megatrain_launcher.hosts.slurm import SlurmPlatform, is_slurm_task
from megatrain_launcher.launch.flags import LaunchFlags
from megatrain_launcher.launch.machine import hardware_text, num_gpus, num_workers
from megatrain_launcher.launch.plan import choose_platform, make_plan
from tests.helpers.launch_cases import small_flags

SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "2",
    "SLURMD_NODENAME": "node7",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_RESTART_COUNT": "1",
    "SLURM_TOPOLOGY_ADDR": "s0.s3.node7",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
}


def test_name_of_a_machine_is_a_host_id(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, host in (
        ("node-3.example", "node-3.example"),
        ("a b/c", "a-b-c"),
        ("..x", "x"),
        ("-", "host"),
        ("", "host"),
    ):
        monkeypatch.setattr("socket.gethostname", lambda name=name: name)
        assert host_name() == host


def test_each_session_has_an_id_of_its_own() -> None:
    assert len({new_session() for _ in range(9)} - {None, ""}) == 9


def problem_of(flags: LaunchFlags, environment: Mapping[str, str]) -> str:
    """Return why flags are refused, or "" if they are accepted."""
    try:
        make_plan(flags, environment)
    except ConfigError as error:
        return str(error)
    return ""


def test_counts_that_cannot_train_are_left_out(tmp_path: Path) -> None:
    flags = small_flags(tmp_path, min_hosts=1, max_hosts=7, workers="1")
    slots = {1: 12, 2: 6, 3: 4, 4: 3, 5: 3, 6: 2, 7: 2}
    assert make_plan(flags, {}).feasible_hosts == slots, "5 and 7 replicas need not divide the batch of 12"
    plan = make_plan(replace(flags, overrides=("--parallel.pp_size=2",)), {})
    assert plan.feasible_hosts == {2: 12, 4: 6, 6: 4}
    (note,) = plan.notes()
    assert note.startswith("1, 3, 5, 7 hosts cannot train with this configuration (1: parallel.pp_size * tp_size = 2")


def test_counts_have_the_mean_slots_of_all_stages(tmp_path: Path) -> None:
    """Two steps of 12 and two of 8 micro-batches."""
    stage = ("--data_stage.after_tokens=384", "--data_stage.global_batch_size=8")
    plan = make_plan(small_flags(tmp_path, min_hosts=1, max_hosts=7, workers="1", overrides=stage), {})
    assert plan.feasible_hosts == {1: 10, 2: 5, 3: 3.5, 4: 2.5, 5: 2.5, 6: 2, 7: 2}


def test_missing_black_boxes_are_reported_with_their_cost(tmp_path: Path) -> None:
    (note,) = make_plan(small_flags(tmp_path, overrides=('--telemetry.black_box_directory=""',)), {}).notes()
    assert "no hang is detected" in note
    assert make_plan(small_flags(tmp_path), {}).notes() == []


def test_counts_that_all_cannot_train_are_refused_with_reasons(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must equal the world size of 35 processes") as caught:
        overrides = ("--parallel.dp_size=4",)
        make_plan(small_flags(tmp_path, min_hosts=5, max_hosts=7, workers="5", overrides=overrides), {})
    assert len(caught.value.problems) == 1


def test_configuration_errors_are_reported_first_and_together(tmp_path: Path) -> None:
    flags = small_flags(tmp_path, overrides=("--model.num_layer=3", "--train.steps=0"), workers="nine")
    with pytest.raises(ConfigError) as caught:
        make_plan(flags, {})
    assert len(caught.value.problems) == 2


def test_data_are_required_for_the_own_trainer_only(tmp_path: Path) -> None:
    without_data = ("--data.train=",)
    with pytest.raises(ConfigError, match=r"data\.train"):
        make_plan(small_flags(tmp_path, overrides=without_data), {})
    make_plan(small_flags(tmp_path, overrides=without_data, module="json.tool"), {})


def test_module_that_workers_lack_is_refused(tmp_path: Path) -> None:
    for module, why_not in [
        ("nosuchmodule", "there is no module nosuchmodule in .* or in sys.path"),
        ("json.nosuchmodule", r"there is no module json\.nosuchmodule"),
        ("json.tool.deeper", r"there is no module json\.tool\.deeper"),
        ("json", r"is a package without a __main__\.py"),
        ("../train", "there is no module"),
    ]:
        found = problem_of(small_flags(tmp_path, module=module), {})
        assert re.search(f"-m {module}: {why_not}", found), (module, found)


def test_modules_are_found_where_workers_find_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").mkdir()
    for name in ("own_train.py", "own/__init__.py", "own/__main__.py", "own/train.py"):
        (tmp_path / name).write_text("raise SystemExit('never run to look for it')\n")
    monkeypatch.chdir(tmp_path)
    for module in ("own_train", "own", "own.train", "tests.helpers.step_faults", "timeit"):
        assert make_plan(small_flags(tmp_path, module=module), {}).flags.module == module


def test_single_host_without_endpoint_starts_etcd(tmp_path: Path) -> None:
    assert make_plan(small_flags(tmp_path), {}).is_alone
    assert make_plan(small_flags(tmp_path, is_standalone=True, min_hosts=2, max_hosts=2), {}).is_alone
    assert not make_plan(small_flags(tmp_path, etcd=EtcdFlags("e:1")), {}).is_alone
    assert not make_plan(small_flags(tmp_path, spares=1), {}).is_alone


def test_settings_of_the_executor(tmp_path: Path) -> None:
    flags = small_flags(
        tmp_path, min_hosts=2, max_hosts=3, workers="2", host_id="h1", labels={"switch": "s1"}, log_dir="logs",
        tee="all", kernel_log="kmsg", overrides=("--train.steps=5",),
    )  # fmt: skip
    etcd = EtcdSettings.of("127.0.0.1:1")

    settings = make_plan(flags, {}).executor_settings(etcd, {"A": "b"}, launch_id="one", address="127.0.0.1")

    assert (settings.host, settings.address, settings.num_workers) == ("h1", "127.0.0.1", 2)
    assert (settings.min_hosts, settings.max_hosts, settings.feasible_hosts.keys()) == (2, 3, {2, 3})
    assert settings.arguments == (str(tmp_path / "small.toml"), "--train.steps=5")
    assert (settings.module, settings.preload) == ("megatrain.train", ("megatrain.training.worker",))
    assert settings.environment == {"A": "b"}
    assert (settings.logs, settings.places.kernel_log) == (Path("logs").absolute(), Path("kmsg").absolute())
    assert (settings.tee, settings.launch_id, settings.labels) == ("all", "one", {"switch": "s1"})
    assert "core" in settings.hardware
    assert settings.config.train.steps == 5


def test_default_address_is_the_one_towards_etcd(tmp_path: Path) -> None:
    etcd = EtcdSettings.of("127.0.0.1:2379")
    assert make_plan(small_flags(tmp_path), {}).address(etcd) == "127.0.0.1"
    assert make_plan(small_flags(tmp_path, local_addr="h7.net"), {}).address(etcd) == "h7.net"
    by_interface = small_flags(tmp_path, overrides=("--runtime.network_interface=lo",))
    assert make_plan(by_interface, {}).address(EtcdSettings.of("192.0.2.1:1")) == "127.0.0.1"
    with pytest.raises(ConfigError, match=r'network_interface="nope9".* name one that `ip address` lists'):
        interface_address("nope9")
    with pytest.raises(ConfigError, match=r"no route from here to http://no-such-host.invalid:1"):
        make_plan(small_flags(tmp_path), {}).address(EtcdSettings.of("no-such-host.invalid:1"))


def test_a_name_that_means_loopback_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def entries(*addresses: str) -> list[object]:
        return [(None, None, None, "", (address, 9)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entries("127.0.1.1", "fe80::1", "::1"))
    assert resolve("me") == ""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entries("127.0.1.1", "2001:db8::7", "192.0.2.7"))
    assert resolve("me") == "192.0.2.7"


def test_slurm_variables_identify_a_host(tmp_path: Path) -> None:
    facts = SlurmPlatform(SLURM).facts()
    assert (facts.host, facts.address, facts.num_hosts, facts.index) == ("node7", "node7", 3, 2)
    assert facts.launch_id == "slurm-17.1.0"
    assert facts.labels == {"switch": "s0.s3"}

    plan = make_plan(small_flags(tmp_path, spares=1, labels={"rack": "r"}), SLURM)
    assert (plan.min_hosts, plan.max_hosts, plan.facts.host) == (2, 2, "node7")
    assert plan.facts.labels == {"switch": "s0.s3", "rack": "r"}


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("SLURM_TOPOLOGY_ADDR", ""),
        ("SLURM_TOPOLOGY_ADDR_PATTERN", "switch.node"),
        ("SLURM_TOPOLOGY_ADDR_PATTERN", "switch.block.node"),
    ],
)
def test_slurm_topology_that_names_no_switch_gives_no_label(variable: str, text: str) -> None:
    assert SlurmPlatform(SLURM | {variable: text}).facts().labels == {}


def test_slurm_variables_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, str], dict[str, int], str]] = [
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x3)"}, {}, "use srun --ntasks-per-node=1"),
        ({"SLURM_STEP_NUM_NODES": ""}, {}, "SLURM_STEP_NUM_NODES is not set"),
        ({}, {"spares": 3}, "--spares=3 of 3 hosts leave none to train"),
        ({}, {"min_hosts": 4, "max_hosts": 6}, "--nnodes=4:6, but this launch has 3 hosts"),
    ]
    for changes, flags, expected in cases:
        found = problem_of(small_flags(tmp_path, **flags), SLURM | changes)
        assert expected in found, (changes, flags, found)


def test_shell_of_salloc_or_sbatch_is_no_slurm_task() -> None:
    assert is_slurm_task(SLURM)
    assert not is_slurm_task({"SLURM_JOB_ID": "17"})
    assert not is_slurm_task(SLURM | {"SLURM_STEP_ID": "4294967291"})
    assert choose_platform("auto", {"SLURM_JOB_ID": "17"}).name == "local"
    assert choose_platform("local", SLURM).name == "local"


def test_the_variables_of_a_pod_name_its_node() -> None:
    environment = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1", "NODE_NAME": "node-a", "POD_IP": "10.1.2.3", "JOBSET_NAME": "big",
        "JOBSET_RESTART_ATTEMPT": "2", "JOB_COMPLETION_INDEX": "5",
    }  # fmt: skip
    platform = choose_platform("auto", environment)
    assert isinstance(platform, KubernetesPlatform)
    facts = platform.facts()
    assert (facts.host, facts.address, facts.launch_id, facts.index) == ("node-a", "10.1.2.3", "big.2", 5)


def test_local_platform_has_the_host_name_and_no_cordon() -> None:
    assert LocalPlatform().facts().host == host_name()
    assert LocalPlatform().cordon("h", "why") == ""


def test_number_of_workers_follows_gpus_or_cores(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    cores = len(os.sched_getaffinity(0))

    def count(text: str, device: str = "auto", **environment: str) -> int:
        return num_workers(text, device, environment, tmp_path)

    assert count("5") == 5
    assert count("gpu") == count("auto") == 3
    assert count("gpu", CUDA_VISIBLE_DEVICES="2,0") == 2
    assert count("gpu", CUDA_VISIBLE_DEVICES="2,-1,0") == 1
    assert count("cpu") == count("auto", "cpu") == count("auto", CUDA_VISIBLE_DEVICES="") == cores
    for text, device in (("0", "auto"), ("many", "auto"), ("-1", "auto"), ("gpu", "cpu")):
        with pytest.raises(ConfigError, match=f"--nproc-per-node={text}"):
            count(text, device)
    assert num_gpus({}, tmp_path / "nowhere") == 0


def test_hardware_is_described_as_text(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    information = tmp_path / "driver/nvidia/gpus/0000:01:00.0/information"
    information.parent.mkdir(parents=True)
    information.write_text("Model: \t\t NVIDIA H100\nIRQ: 3\n")
    assert hardware_text({}, tmp_path, tmp_path).startswith("1 x NVIDIA H100, ")
