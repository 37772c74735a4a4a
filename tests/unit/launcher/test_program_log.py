"""Log lines of the launcher: control characters that come from ranks and keys are escaped."""

from __future__ import annotations

import logging

from megatrain_launcher.logs.program_log import PrintableFormatter


def test_control_characters_of_ranks_are_shown() -> None:
    formatter = PrintableFormatter("%(levelname)s %(message)s")
    record = logging.LogRecord(
        "megatrain", logging.INFO, "", 1, "rank %d: %s", (3, "a\x1b]0;title\x07\x9b31m b\r"), None
    )
    assert formatter.format(record) == "INFO rank 3: a\\x1b]0;title\\x07\\x9b31m b\\r"
