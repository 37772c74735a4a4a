"""The program's own log on stderr. It quotes rank logs and etcd keys, so control codes are escaped before they reach a
terminal.
"""

from __future__ import annotations

import logging
import sys

from megatrain.formatting import printable


class PrintableFormatter(logging.Formatter):
    """Writes control codes as escapes."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def log_to_stderr() -> None:
    """Show the program's own log, from INFO on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("torch").setLevel(logging.WARNING)  # it logs statistics of its caches at exit
    logging.basicConfig(level=logging.INFO, handlers=[handler])
