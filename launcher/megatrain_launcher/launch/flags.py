"""The command line of `megatrain launch`: torchrun's flag names in both spellings, and what torchrun does not have."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatrain.commands.argument_types import spellings
from megatrain.commands.etcd_flags import EtcdFlags, add_etcd_arguments, etcd_flags
from megatrain.contracts.errors import ConfigError, FlagError
from megatrain_launcher.launch.torchrun_flags import add_refusals

DEFAULT_MODULE = "megatrain.train"
DEFAULT_PRELOAD = "megatrain.worker"
TEMPLATES = ("slurm", "jobset", "trainjob")
PLATFORMS = ("auto", "local", "slurm", "kubernetes")
_MOST_HOSTS = 100_000
_RANGE = re.compile(r"(\d{1,6})(?::(\d{1,6}))?")
_NODE = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
Tee = Literal["none", "first", "all"]
_TEES: Mapping[str, Tee] = {"none": "none", "first": "first", "all": "all", "0": "none", "3": "all"}


@dataclass(frozen=True, slots=True)
class LaunchFlags:
    """What the command line says; empty or None where it says nothing."""

    config: Path
    overrides: tuple[str, ...] = ()
    module: str = DEFAULT_MODULE
    preload: tuple[str, ...] = (DEFAULT_PRELOAD,)
    min_hosts: int | None = None
    max_hosts: int | None = None
    spares: int = 0
    workers: str = "1"
    is_standalone: bool = False
    etcd: EtcdFlags = field(default_factory=EtcdFlags)
    launch_id: str = ""
    host_id: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    local_addr: str = ""
    log_dir: str = ""
    tee: Tee = "first"
    is_driver_candidate: bool = True
    is_daemon_candidate: bool = True
    platform: str = "auto"
    template: str = ""
    image: str = ""
    nodes: tuple[str, ...] = ()
    """Of a JobSet: where it runs, and which nodes it may cordon; empty: anywhere, and none."""


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add everything that `launch_flags` reads."""
    add_config_argument(parser)
    parser.add_argument(
        "-m", "--module", default=DEFAULT_MODULE, metavar="MODULE", help=f"what workers run (default: {DEFAULT_MODULE})"
    )
    parser.add_argument(
        "--preload",
        default=DEFAULT_PRELOAD,
        metavar="MODULE[,MODULE]",
        help="imported once a host, before workers are forked, so that a restart need not wait for it; empty: nothing "
        f"(default: {DEFAULT_PRELOAD})",
    )
    _add_host_arguments(parser)
    add_etcd_arguments(parser)
    add_job_argument(parser)
    _add_output_arguments(parser)
    parser.add_argument(*spellings("--rdzv-backend"), default="megatrain", help=argparse.SUPPRESS)
    add_refusals(parser)


def _add_host_arguments(parser: argparse.ArgumentParser) -> None:
    hosts = parser.add_argument_group("hosts and workers")
    add_hosts_argument(hosts)
    add_workers_argument(hosts)
    hosts.add_argument(
        "--spares",
        type=int,
        default=0,
        metavar="N",
        help="hosts beyond MAX that wait to take another's place: started too by --standalone, counted in what "
        "Slurm gives and in templates; elsewhere a host that is too many waits by itself",
    )
    hosts.add_argument(
        "--standalone",
        action="store_true",
        help="all on this machine, with an etcd of its own; the default where there is one host and no endpoint",
    )
    hosts.add_argument(
        *spellings("--launch-id"),
        default="",
        metavar="ID",
        help="the same on all hosts of one launch, new for each launch (default: as Slurm or Kubernetes says)",
    )
    hosts.add_argument(*spellings("--host-id"), default="", metavar="NAME", help="what this host is called")
    hosts.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="where this host is, switch=s1 for instance; hosts of one switch get neighbouring ranks",
    )
    hosts.add_argument(
        *spellings("--local-addr"), default="", metavar="ADDRESS", help="where the other hosts reach this one"
    )
    hosts.add_argument(
        *spellings("--no-driver"), action="store_true", help="this host never drives: for jobs with `megatrain driver`"
    )
    hosts.add_argument(
        *spellings("--no-daemon"),
        action="store_true",
        help="this host never runs the job's daemon and web page: for jobs that have them elsewhere",
    )
    hosts.add_argument(
        "--platform", choices=PLATFORMS, default="auto", help="what runs the hosts (default: as the environment says)"
    )


def _add_output_arguments(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument(*spellings("--log-dir"), default="", metavar="DIR", help="logs of ranks (default: <run>/logs)")
    output.add_argument(
        "-t",
        "--tee",
        default="first",
        metavar="none|first|all",
        help="ranks whose lines are shown too (default: first)",
    )
    output.add_argument(
        *spellings("--write-template"),
        dest="template",
        choices=TEMPLATES,
        default="",
        help="print what starts this launch on a cluster, and do nothing else",
    )
    output.add_argument("--image", default="", metavar="IMAGE", help="container image, for --write-template")
    output.add_argument(
        "--node",
        action="append",
        default=[],
        metavar="NAME",
        help="a node on which the job runs, for --write-template jobset: once for each; the job may cordon these alone",
    )


def add_config_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file; see `megatrain config reference`")


def add_hosts_argument(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--nnodes", default="", metavar="MIN[:MAX]", help="hosts that train (default: 1, or those that Slurm gives)"
    )


def add_workers_argument(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        *spellings("--nproc-per-node"), default="1", metavar="N|auto|gpu|cpu", help="workers a host (default: 1)"
    )


def add_job_argument(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(*spellings("--rdzv-id"), default="", metavar="NAME", help="the same as --job.name=NAME")


def launch_flags(args: argparse.Namespace) -> LaunchFlags:
    """Return what the command line says. Raises: FlagError with everything that is wrong with it."""
    problems: list[str] = []
    if args.rdzv_backend != "megatrain":
        problems.append(f"--rdzv-backend={args.rdzv_backend}: hosts meet at etcd here; leave it out")
    overrides = tuple(args.overrides)
    if args.rdzv_id:
        overrides += _job_name(args.rdzv_id, overrides, problems)
    smallest, largest = parse_hosts(args.nnodes, problems)
    if not 0 <= args.spares <= _MOST_HOSTS:
        problems.append(f"--spares={args.spares}: expected a number of hosts")
    if args.host_id:
        check_name("--host-id", args.host_id, problems)
    tee = _TEES.get(args.tee)
    if tee is None:
        problems.append(f"--tee={args.tee}: expected none, first (rank 0 of the job) or all")
    etcd = EtcdFlags()
    try:
        etcd = etcd_flags(args)
    except ConfigError as error:
        problems.extend(error.problems)
    if args.standalone and etcd.endpoints:
        problems.append("--standalone brings its own etcd, and --rdzv-endpoint names another; give one of them")
    labels = _labels(args.label, problems)
    nodes = _nodes(args.node, args.template, problems)
    if problems or tee is None:
        raise FlagError(problems)
    return LaunchFlags(
        config=args.config,
        overrides=overrides,
        module=args.module,
        preload=tuple(module for module in args.preload.split(",") if module),
        min_hosts=smallest,
        max_hosts=largest,
        spares=args.spares,
        workers=args.nproc_per_node,
        is_standalone=args.standalone,
        etcd=etcd,
        launch_id=args.launch_id,
        host_id=args.host_id,
        labels=labels,
        local_addr=args.local_addr,
        log_dir=args.log_dir,
        tee=tee,
        is_driver_candidate=not args.no_driver,
        is_daemon_candidate=not args.no_daemon,
        platform=args.platform,
        template=args.template,
        image=args.image,
        nodes=nodes,
    )


def parse_hosts(text: str, problems: list[str]) -> tuple[int | None, int | None]:
    """Return MIN and MAX of --nnodes, nothing where it is empty."""
    if not text:
        return None, None
    match = _RANGE.fullmatch(text.strip())
    smallest = int(match.group(1)) if match else 0
    largest = int(match.group(2) or match.group(1)) if match else 0
    if not 1 <= smallest <= largest <= _MOST_HOSTS:
        problems.append(f"--nnodes={text}: expected a number of hosts, or MIN:MAX with 1 <= MIN <= MAX")
        return None, None
    return smallest, largest


def check_name(option: str, name: str, problems: list[str]) -> None:
    """Note a name that cannot be part of a key or of a file's name."""
    if not _NAME.fullmatch(name):
        problems.append(f"{option}={name!r}: expected letters, digits, and - _ . after the first of them")


def _job_name(name: str, overrides: Sequence[str], problems: list[str]) -> tuple[str, ...]:
    told = [text.partition("=")[2] for text in overrides if text.startswith("--job.name=")]
    if told and told[-1] != name:
        problems.append(f"--rdzv-id={name} and --job.name={told[-1]} name two jobs; give one of them")
    check_name("--rdzv-id", name, problems)
    return (f"--job.name={name}",)


def _nodes(names: Sequence[str], template: str, problems: list[str]) -> tuple[str, ...]:
    if names and template != "jobset":
        problems.append("--node does nothing without --write-template jobset, whose pods it binds to these nodes")
    problems += [f"--node={name!r}: expected the name of a node" for name in names if not _NODE.fullmatch(name)]
    problems += [f"--node={name} is there twice" for name in sorted(set(names)) if names.count(name) > 1]
    return tuple(names)


def _labels(texts: Sequence[str], problems: list[str]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for text in (part.strip() for whole in texts for part in whole.split(",")):
        name, _, value = text.partition("=")
        if not name or not value:
            problems.append(f"--label {text}: expected NAME=VALUE, switch=s1 for instance")
        elif labels.get(name, value) != value:
            problems.append(f"--label {name}: {labels[name]} and {value}; a host is in one place")
        labels[name] = value
    return labels
