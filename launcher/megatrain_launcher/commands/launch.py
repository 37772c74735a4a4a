"""`megatrain launch CONFIG`: train on this host, or on all hosts that are told the same, and keep it going."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import TYPE_CHECKING

from megatrain.config.load import load_config
from megatrain.contracts.printable import printable
from megatrain_launcher.launch.flags import DEFAULT_MODULE, LaunchFlags, add_launch_arguments, launch_flags

if TYPE_CHECKING:
    from megatrain_launcher.executor.settings import ExecutorSettings

SUMMARY = "train on one host or many: checks hosts, restarts what breaks, takes spares; torchrun's flags"
ACCEPTS_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_launch_arguments(parser)


def run(args: argparse.Namespace) -> int:
    flags = launch_flags(args)
    if flags.template:
        print(_template(flags), end="")
        return 0
    from megatrain_launcher.launch.host import run_launch
    from megatrain_launcher.launch.plan import make_plan

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    environment = dict(os.environ)
    plan = make_plan(flags, environment)

    def execute(settings: ExecutorSettings) -> int:
        # here: both load torch, which takes seconds and is for nothing where several executors are started
        from megatrain_launcher.executor.executor import run_executor
        from megatrain_launcher.launch.cordons import parts_with

        return run_executor(settings, parts_with(plan.platform))

    return run_launch(plan, environment, execute, _tell)


def _template(flags: LaunchFlags) -> str:
    from megatrain_launcher.launch.plan import count_hosts
    from megatrain_launcher.launch.templates import write_template

    loaded = load_config(flags.config, flags.overrides, is_for_training=flags.module == DEFAULT_MODULE)
    largest = flags.max_hosts or 1
    if flags.workers.isdigit():  # what a host of the cluster has is not known here
        count_hosts(loaded.config, loaded.origins, flags.min_hosts or largest, largest, int(flags.workers))
    return write_template(flags, loaded.config, largest)


def _tell(text: str) -> None:
    print(f"megatrain: {printable(text)}", file=sys.stderr, flush=True)
