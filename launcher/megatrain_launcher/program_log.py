"""The program's own log on stderr. It quotes logs of ranks and keys of etcd: no terminal shall obey those."""

from __future__ import annotations

import logging
import sys

from megatrain.contracts.printable import printable


class PrintableFormatter(logging.Formatter):
    """Writes what a terminal would obey as escapes."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def log_to_stderr() -> None:
    """Show what the program tells of itself, from INFO on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("torch").setLevel(logging.WARNING)  # it counts its caches at exit
    logging.basicConfig(level=logging.INFO, handlers=[handler])
