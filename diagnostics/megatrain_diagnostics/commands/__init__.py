"""`megatrain diag`: analyses of a job's events, the daemon, and the settings of recording.

Analyses read the segments in <run>/events, of a running or a finished job, and work without the daemon; `hang` and
`whatif` can also read other files, and `verdicts` reads etcd. As in megatrain.cli, only the module of the subcommand
that is used is imported, so that commands start fast.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    _Action = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    _Action = argparse._SubParsersAction

SUMMARY = (
    "stragglers, hangs, timelines and what-if from the events of all ranks; the daemon; settings of what is recorded"
)

_VERBS = {
    "comm": "comm",
    "daemon": "daemon",
    "drift": "drift",
    "explain": "explain",
    "hang": "hang",
    "off": "switch",
    "on": "switch",
    "set": "switch",
    "stragglers": "stragglers",
    "timeline": "timeline",
    "verdicts": "verdicts",
    "whatif": "whatif",
}
"""Subcommand -> module of this package; its `add_verb(verbs)` adds the parser and sets the default `run_verb`."""


class _Parsers(dict[str, argparse.ArgumentParser]):
    """The parsers of the subcommands. A parser is created when it is looked up; iteration creates all parsers."""

    def __init__(self, action: _Action) -> None:
        super().__init__()
        self._action = action
        self._loaded: set[str] = set()

    def __contains__(self, name: object) -> bool:
        if isinstance(name, str) and name in _VERBS:
            self._load(_VERBS[name])
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        self.load_all()
        return super().__iter__()

    def load_all(self) -> None:
        for module in dict.fromkeys(_VERBS.values()):
            self._load(module)

    def _load(self, module: str) -> None:
        if module not in self._loaded:
            self._loaded.add(module)
            importlib.import_module(f"{__name__}.{module}").add_verb(self._action)


class _VerbsAction(_Action):
    """A subparsers action that creates its parsers lazily."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._parsers = _Parsers(self)
        self.choices = self._name_parser_map = self._parsers

    def _get_subactions(self) -> list[argparse.Action]:
        """Return the entries of the help text."""
        self._parsers.load_all()
        return super()._get_subactions()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands and their options."""
    parser.add_subparsers(dest="diag_verb", required=True, metavar="SUBCOMMAND", action=_VerbsAction)


def run(args: argparse.Namespace) -> int:
    """Run the parsed command line; return the exit code. Raises: MegatrainError."""
    with importlib.import_module(f"{__name__}.arguments").problems_on_error(args):
        code: int = args.run_verb(args)
    return code
