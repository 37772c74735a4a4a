"""The weight of each sign of failure. The heaviest decides; among equals the first in the log.

The order is that of causation: a broken GPU causes a CUDA error, that an exception, that a peer's lost connection, that
a timeout, that an abort. A consequence never outweighs a possible cause.
"""

from __future__ import annotations

from typing import Final

HARDWARE: Final = 95
"""The hardware itself, or the kernel, reports that it is broken."""
HOST: Final = 90
"""The host's software is broken, or its memory was exhausted."""
ENDED_BY_OTHERS: Final = 85
"""A scheduler reports that it ended the job."""
SPECIFIC: Final = 80
"""A message with one meaning: this allocation, this file, this check failed."""
DEVICE_FAULT: Final = 75
"""The program or the GPU did something illegal: a later call raises the exception."""
LINK: Final = 70
"""The network's own message about a link or a path."""
CRASH: Final = 65
"""The process died of a signal that it caused itself."""
EXCEPTION: Final = 60
"""A Python exception that no other rule matches."""
TIMEOUT: Final = 50
"""A collective did not end in time: another rank is the cause."""
LOST_PEER: Final = 45
"""A connection ended at the other side: a cause only if nothing better is found."""
ABORT: Final = 40
"""The process aborted after an earlier message."""
EXIT_CODE: Final = 35
"""A launcher's summary of how a process ended."""
SIGNAL_FROM_OUTSIDE: Final = 30
"""A request to stop, from anybody."""
NOISE: Final = 10
"""A line that looks like a failure and is none."""

ROOT_BONUS: Final = 4
"""Added to what torch's agent calls the root cause: it outweighs exit codes, but not a program's own messages."""
