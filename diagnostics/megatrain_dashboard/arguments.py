"""Command-line options for the keys of the section [dashboard]. The module imports no web server."""

from __future__ import annotations

import argparse
from typing import Any

from megatrain.commands.argument_types import utf8_text, whole_number
from megatrain.config.dashboard import DashboardConfig
from megatrain.config.options import options_of


def add_dashboard_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare an option for each key of the section; `given_settings` returns the ones that were given."""
    group = parser.add_argument_group(
        "the dashboard (these options override the section [dashboard] of the job's configuration)"
    )
    for name, option in _options().items():
        settings: dict[str, Any] = {"dest": f"page_{name}", "default": None, "help": option.doc.replace("%", "%%")}
        spelling = f"--{name.replace('_', '-')}"
        if option.kind == "bool":
            group.add_argument(spelling, action="store_true", **settings)
        elif option.kind == "int":
            group.add_argument(spelling, type=whole_number(0, int(option.maximum or 0)), metavar="N", **settings)
        else:
            group.add_argument(spelling, type=utf8_text, metavar=name.rpartition("_")[2].upper(), **settings)


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return key -> value of the options that the command line gives."""
    found = {name: getattr(args, f"page_{name}") for name in _options()}
    return {name: value for name, value in found.items() if value is not None}


def _options() -> dict[str, Any]:
    """Return the options, without `is_served`: a page that is started by hand is always served."""
    return {name: option for name, option in options_of(DashboardConfig).items() if name != "is_served"}
