"""How much a sign of failure weighs. The heaviest decides; among equals the first in the log.

The order is the one in which causes lie behind each other: a broken GPU makes a CUDA error, that an exception, that a
peer's lost connection, that a timeout, that an abort. A consequence never outweighs a possible cause.
"""

from __future__ import annotations

from typing import Final

HARDWARE: Final = 95
"""The hardware itself, or the kernel about it, says that it is broken."""
HOST: Final = 90
"""The host's software is broken, or its memory was at an end."""
ENDED_BY_OTHERS: Final = 85
"""A scheduler says that it ended the job."""
SPECIFIC: Final = 80
"""A message with one meaning: this allocation, this file, this check failed."""
DEVICE_FAULT: Final = 75
"""The program or the GPU did something illegal: an exception about it comes at some later call."""
LINK: Final = 70
"""The network's own words about a link or a path."""
CRASH: Final = 65
"""The process died of a signal that it caused itself."""
EXCEPTION: Final = 60
"""A Python exception that no other rule knows."""
TIMEOUT: Final = 50
"""A collective did not end in time: somebody else is the cause."""
LOST_PEER: Final = 45
"""A connection ended at the other side: a cause only when nothing better is there."""
ABORT: Final = 40
"""The process took itself down after something that was said before."""
EXIT_CODE: Final = 35
"""A launcher's summary of how a process ended."""
SIGNAL_FROM_OUTSIDE: Final = 30
"""A request to stop, by whomever."""
NOISE: Final = 10
"""What looks like a failure and is none."""

ROOT_BONUS: Final = 4
"""Added to what torch's agent calls the root cause: it decides over exit codes, not over a program's own words."""
