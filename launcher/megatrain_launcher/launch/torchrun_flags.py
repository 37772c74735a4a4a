"""torchrun's flags that have no meaning here: each is refused, with a hint about what to use instead."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from megatrain.commands.argument_types import spellings

_LEAVE_OUT = "leave it out"

REFUSED: Mapping[str, str] = {
    "--max-restarts": "the driver restarts; set recovery.restarts_per_hour and recovery.restarts_without_progress",
    "--monitor-interval": f"worker exits are noticed without polling; {_LEAVE_OUT}",
    "--start-method": f"workers are forked by a server that has torch loaded; {_LEAVE_OUT}",
    "--event-log-handler": "incidents are records: see `megatrain incidents`",
    "--role": f"all workers are alike; {_LEAVE_OUT}",
    "--no-python": "workers are Python modules: name one with -m",
    "--run-path": "workers are Python modules: name one with -m",
    "--redirects": "every rank's output is already in a file; --log-dir sets where, --tee which ranks are also shown",
    "--local-ranks-filter": "use --tee first or --tee all",
    "--duplicate-stdout-filters": "see `megatrain logs classify` for the lines that matter",
    "--duplicate-stderr-filters": "see `megatrain logs classify` for the lines that matter",
    "--node-rank": "the driver assigns ranks; --host-id names this host",
    "--master-addr": "hosts find each other through etcd: use --rdzv-endpoint",
    "--master-port": "hosts find each other through etcd: use --rdzv-endpoint",
    "--logs-specs": "every rank's output is already in a file; --log-dir sets where",
    "--numa-binding": "set runtime.cpu_binding",
    "--signals-to-handle": f"SIGTERM, SIGINT, SIGHUP and SIGUSR1 all save and stop; {_LEAVE_OUT}",
    "--shutdown-timeout": "set runtime.save_grace_s",
    "--virtual-local-rank": f"workers choose their device by LOCAL_RANK; {_LEAVE_OUT}",
}
_SHORT = {"--redirects": "-r"}
_WITHOUT_VALUE = {"--no-python", "--run-path", "--virtual-local-rank"}


class _RefusedFlag(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> NoReturn:
        parser.error(f"torchrun's {option_string} is not used here: {REFUSED[self.option_strings[0]]}")


def add_refusals(parser: argparse.ArgumentParser) -> None:
    """Make every flag of REFUSED a usage error."""
    for option in REFUSED:
        names = [*spellings(option), *([_SHORT[option]] if option in _SHORT else [])]
        parser.add_argument(
            *names, action=_RefusedFlag, nargs=0 if option in _WITHOUT_VALUE else "?", help=argparse.SUPPRESS
        )
