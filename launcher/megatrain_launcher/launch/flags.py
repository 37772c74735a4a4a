"""The command line of `megatrain launch`: torchrun's flag names in both spellings, and flags that torchrun lacks."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatrain.commands.argument_types import spellings
from megatrain.contracts.errors import ConfigError, FlagError
from megatrain_job.commands.etcd_flags import EtcdFlags, add_etcd_arguments, etcd_flags
from megatrain_launcher.launch.torchrun_flags import add_refusals
from megatrain_launcher.logs.tee import TeeChoice

DEFAULT_MODULE = "megatrain.train"
DEFAULT_PRELOAD = "megatrain.training.worker"
TEMPLATES = ("slurm", "jobset", "trainjob")
PLATFORMS = ("auto", "local", "slurm", "kubernetes")
_MAX_HOSTS = 100_000
_RANGE = re.compile(r"(\d{1,6})(?::(\d{1,6}))?")
_NODE = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TEES: Mapping[str, TeeChoice] = {"none": "none", "first": "first", "all": "all", "0": "none", "3": "all"}


@dataclass(frozen=True, slots=True)
class LaunchFlags:
    """The options of the command line. An option that is not given is empty, None or its default."""

    config: Path
    overrides: tuple[str, ...] = ()
    from_hf: str = ""
    """The Hugging Face model to start from."""
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
    kernel_log: str = ""
    log_dir: str = ""
    tee: TeeChoice = "first"
    is_driver_candidate: bool = True
    is_daemon_candidate: bool = True
    platform: str = "auto"
    template: str = ""
    image: str = ""
    nodes: tuple[str, ...] = ()
    """The nodes on which a JobSet runs and which it may cordon; empty: it runs on any node and may cordon none."""


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that `launch_flags` reads."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file; see `megatrain config reference`")
    parser.add_argument(
        "--from-hf",
        default="",
        metavar="HF_DIR",
        help="start from this Hugging Face model: [model] comes from its config.json, and its weights are imported",
    )
    parser.add_argument(
        "-m",
        "--module",
        default=DEFAULT_MODULE,
        metavar="MODULE",
        help=f"module that workers run (default: {DEFAULT_MODULE})",
    )
    parser.add_argument(
        "--preload",
        default=DEFAULT_PRELOAD,
        metavar="MODULE[,MODULE]",
        help="modules that each host imports once, before workers are forked, so that a restart skips the imports; "
        f"empty: none (default: {DEFAULT_PRELOAD})",
    )
    _add_host_arguments(parser)
    add_etcd_arguments(parser)
    parser.add_argument(*spellings("--rdzv-id"), default="", metavar="NAME", help="the same as --job.name=NAME")
    _add_output_arguments(parser)
    parser.add_argument(*spellings("--rdzv-backend"), default="megatrain", help=argparse.SUPPRESS)
    add_refusals(parser)


def _add_host_arguments(parser: argparse.ArgumentParser) -> None:
    hosts = parser.add_argument_group("hosts and workers")
    hosts.add_argument(
        "--nnodes",
        default="",
        metavar="MIN[:MAX]",
        help="hosts that train: MAX, or fewer if hosts are missing, but at least MIN; one number means both "
        "(default: 1, or those of the Slurm step)",
    )
    hosts.add_argument(
        *spellings("--nproc-per-node"), default="1", metavar="N|auto|gpu|cpu", help="workers per host (default: 1)"
    )
    hosts.add_argument(
        "--spares",
        type=int,
        default=0,
        metavar="N",
        help="number of spare hosts. Used by --standalone, Slurm and templates; elsewhere start more hosts than MAX",
    )
    hosts.add_argument(
        "--standalone",
        action="store_true",
        help="all hosts on this machine, with an etcd of the job's own; the default for one host without an endpoint",
    )
    hosts.add_argument(
        *spellings("--launch-id"),
        default="",
        metavar="ID",
        help="id that is the same on all hosts of a launch; each launch needs a new one (default: from Slurm or "
        "Kubernetes)",
    )
    hosts.add_argument(
        *spellings("--host-id"),
        default="",
        metavar="NAME",
        help="name of this host (default: from Slurm or Kubernetes, else the machine's)",
    )
    hosts.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="where this host is, for example switch=s1; hosts of one switch get neighboring ranks",
    )
    hosts.add_argument(
        *spellings("--local-addr"), default="", metavar="ADDRESS", help="address at which other hosts reach this one"
    )
    hosts.add_argument(
        *spellings("--kernel-log"),
        default="",
        metavar="FILE",
        help="kernel's log of this host, or a copy of it, with the errors of its GPUs (default: /dev/kmsg)",
    )
    hosts.add_argument(
        *spellings("--no-driver"),
        action="store_true",
        help="this host is never the driver: for jobs with `megatrain driver`",
    )
    hosts.add_argument(
        *spellings("--no-daemon"),
        action="store_true",
        help="this host never runs the job's daemon and web page: for jobs that have them elsewhere",
    )
    hosts.add_argument(
        "--platform",
        choices=PLATFORMS,
        default="auto",
        help="system that runs the hosts (default: from the environment)",
    )


def _add_output_arguments(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument(*spellings("--log-dir"), default="", metavar="DIR", help="logs of ranks (default: <run>/logs)")
    output.add_argument(
        "-t",
        "--tee",
        default="first",
        metavar="none|first|all",
        help="ranks whose output is also shown (default: first)",
    )
    output.add_argument(
        *spellings("--write-template"),
        dest="template",
        choices=TEMPLATES,
        default="",
        help="print a file that starts this launch on a cluster, and do nothing else",
    )
    output.add_argument("--image", default="", metavar="IMAGE", help="container image, for --write-template")
    output.add_argument(
        "--node",
        action="append",
        default=[],
        metavar="NAME",
        help="node that the job may use and cordon; repeat for each (--write-template jobset only; default: the job "
        "may use any node and cordon none)",
    )


def launch_flags(args: argparse.Namespace) -> LaunchFlags:
    """Return the flags of the command line. Raises: FlagError with all problems."""
    problems: list[str] = []
    if args.rdzv_backend != "megatrain":
        problems.append(f"--rdzv-backend={args.rdzv_backend}: hosts find each other through etcd; leave it out")
    overrides = tuple(args.overrides)
    if args.rdzv_id:
        overrides += _job_name(args.rdzv_id, overrides, problems)
    smallest, largest = _parse_hosts(args.nnodes, problems)
    if not 0 <= args.spares <= _MAX_HOSTS:
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
        problems.append("--standalone starts its own etcd, and --rdzv-endpoint names another; give one of them")
    labels = _labels(args.label, problems)
    nodes = _nodes(args.node, args.template, problems)
    if problems or tee is None:
        raise FlagError(problems)
    return LaunchFlags(
        config=args.config,
        overrides=overrides,
        from_hf=args.from_hf,
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
        kernel_log=args.kernel_log,
        log_dir=args.log_dir,
        tee=tee,
        is_driver_candidate=not args.no_driver,
        is_daemon_candidate=not args.no_daemon,
        platform=args.platform,
        template=args.template,
        image=args.image,
        nodes=nodes,
    )


def _parse_hosts(text: str, problems: list[str]) -> tuple[int | None, int | None]:
    """Return MIN and MAX of --nnodes; None for both if the text is empty, or wrong, which adds a problem."""
    if not text:
        return None, None
    match = _RANGE.fullmatch(text.strip())
    smallest = int(match.group(1)) if match else 0
    largest = int(match.group(2) or match.group(1)) if match else 0
    if not 1 <= smallest <= largest <= _MAX_HOSTS:
        problems.append(f"--nnodes={text}: expected a number of hosts, or MIN:MAX with 1 <= MIN <= MAX")
        return None, None
    return smallest, largest


def check_name(option: str, name: str, problems: list[str]) -> None:
    """Add a problem if the name cannot be part of an etcd key or of a file name."""
    if not _NAME.fullmatch(name):
        problems.append(f"{option}={name!r}: expected letters, digits, - _ . and a letter or digit first")


def _job_name(name: str, overrides: Sequence[str], problems: list[str]) -> tuple[str, ...]:
    job_names = [text.partition("=")[2] for text in overrides if text.startswith("--job.name=")]
    if job_names and job_names[-1] != name:
        problems.append(f"--rdzv-id={name} and --job.name={job_names[-1]} name two jobs; give one of them")
    check_name("--rdzv-id", name, problems)
    return (f"--job.name={name}",)


def _nodes(names: Sequence[str], template: str, problems: list[str]) -> tuple[str, ...]:
    if names and template != "jobset":
        problems.append("--node is only for --write-template jobset, whose pods it binds to nodes; leave it out")
    problems += [f"--node={name!r}: expected the name of a node" for name in names if not _NODE.fullmatch(name)]
    problems += [f"--node={name} is given twice" for name in sorted(set(names)) if names.count(name) > 1]
    return tuple(names)


def _labels(texts: Sequence[str], problems: list[str]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for text in (part.strip() for whole in texts for part in whole.split(",")):
        name, _, value = text.partition("=")
        if not name or not value:
            problems.append(f"--label {text}: expected NAME=VALUE, for example switch=s1")
        elif labels.get(name, value) != value:
            problems.append(f"--label {name} has two values, {labels[name]} and {value}; give one of them")
        labels[name] = value
    return labels
