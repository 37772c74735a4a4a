"""`megatrain notify test RUN|CONFIG`: sends a test message to all configured receivers and prints their answers."""

from __future__ import annotations

import argparse
import os
import stat
import time
from pathlib import Path

from megatrain.commands.argument_types import Verbs, utf8_text
from megatrain.commands.printing import print_lines
from megatrain.config.config import Config
from megatrain.config.load import load_config
from megatrain.contracts.errors import ConfigError, DataError
from megatrain.contracts.exit_codes import ExitCode
from megatrain_job.jobs.health import HealthLevel
from megatrain_launcher.notify.delivery import DeliveryError
from megatrain_launcher.notify.message import Message, PageLinks
from megatrain_launcher.notify.receivers import Receiver, receivers_of
from megatrain_launcher.notify.topics import Event, Stage, Topic

SUMMARY = "test the receivers that a job notifies of its incidents"

_CONFIG_NAME = "config.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommand and its arguments."""
    verbs: Verbs = parser.add_subparsers(dest="notify_verb", required=True, metavar="SUBCOMMAND")
    text = "send a test message and print the receivers' answers"
    test = verbs.add_parser("test", help=text, description=text, allow_abbrev=False)
    test.add_argument("place", type=utf8_text, metavar="RUN|CONFIG", help="a run directory, or a configuration file")
    test.add_argument(
        "--receiver", default="", type=utf8_text, metavar="NAME",
        help="one receiver: slack, pagerduty, email, alertmanager or webhook; the second Slack receiver is slack-2 "
        "(default: all)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Send a test message to the receivers, one after the other. Raises: ConfigError, DataError."""
    config = load_config(_config_file(Path(args.place))).config
    receivers = _chosen(config, args.receiver)
    links = PageLinks(config.notify.page_url, config.notify.runbooks_url)
    lines, has_failed = [], False
    for receiver in receivers:
        try:
            lines.append(f"{receiver.name}: {_try(receiver, config.job.name, links)}")
        except DeliveryError as error:
            has_failed = True
            lines.append(f"{receiver.name}: FAILED: {error}")
    print_lines(lines)
    return int(ExitCode.FAILURE if has_failed else ExitCode.OK)


def _try(receiver: Receiver, job: str, links: PageLinks) -> str:
    """Send a test message and resolve it, so that no alert stays open. Raises: DeliveryError."""
    now_s = time.time()
    topic = _test_topic(now_s, Stage.OPEN)
    answer = receiver.try_once(Message(job, (topic,), links, now_s))
    if receiver.rules.delivery_mode.keeps_state:
        receiver.try_once(Message(job, (_test_topic(now_s, Stage.CLOSED),), links, now_s))
        return f"{answer} (and resolved again)"
    return answer


def _test_topic(now_s: float, stage: Stage) -> Topic:
    return Topic(
        name="test",
        event=Event.TEST,
        level=HealthLevel.AMBER,
        stage=stage,
        what="this is a test message; nothing has happened",
        began_unix_s=now_s,
        ready_unix_s=now_s,
        ended_unix_s=now_s if stage is Stage.CLOSED else None,
        activity="this receiver gets a message when something happens to the job",
        action="no action is needed",
        runbook="notifications.md",
        route="overview",
    )


def _chosen(config: Config, name: str) -> tuple[Receiver, ...]:
    found = receivers_of(config)
    names = ", ".join(receiver.name for receiver in found)
    if not found:
        raise ConfigError(
            ["no receiver is configured; see the sections [slack], [pagerduty], [email], [alertmanager], [webhook]"]
        )
    chosen = tuple(receiver for receiver in found if name in ("", receiver.name))
    if not chosen:
        raise ConfigError([f"--receiver={name!r} is not configured; configured receivers: {names}"])
    return chosen


def _config_file(location: Path) -> Path:
    """Return the configuration file. Raises: DataError if it is missing, or if other users may have written it.

    The author of a configuration could name this user's secrets in it, and an address of their own to send them to.
    """
    if not location.is_dir():
        return location
    path = location / _CONFIG_NAME
    for place in (location, path):
        try:
            status = place.stat(follow_symlinks=False) if place == path else place.stat()
        except OSError as error:
            raise DataError(f"{place}: {error.strerror}; name a run directory or a configuration file") from error
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise DataError(
                f"{place}: other users may have written it, and it decides where secrets are sent; name a file "
                "that only you can write"
            )
        if place == path and not stat.S_ISREG(status.st_mode):
            raise DataError(f"{place}: is not a regular file; name a configuration file")
    return path
