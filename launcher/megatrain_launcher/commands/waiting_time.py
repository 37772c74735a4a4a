"""Options of the verbs that send the driver a request and wait for it."""

from __future__ import annotations

import argparse
import math

DEFAULT_TIMEOUT_S = 900.0


def add_waiting(parser: argparse.ArgumentParser) -> None:
    """Declare --timeout, --no-wait and --json."""
    parser.add_argument("--timeout", dest="timeout_s", type=_seconds, default=DEFAULT_TIMEOUT_S, metavar="SECONDS",
                        help="how long to wait until it is done (default %(default)g)")  # fmt: skip
    parser.add_argument("--no-wait", dest="is_waiting", action="store_false",
                        help="return as soon as the driver has accepted it")  # fmt: skip
    parser.add_argument("--json", action="store_true", dest="is_json", help="print one JSON object")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < 10**7:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of seconds above 0")
    return seconds
