"""How a worker leaves its Python stacks to its host: a signal has them written into a file without a name.

The file is in memory and is found in the worker's own list of open files, so nothing lies about when the worker is
gone. It is written by C code that needs no interpreter lock: also a rank that hangs in native code with the lock held
answers. Writing is telemetry/stack_dumps.py, asking and reading are the diagnosis's streamer/stacks.py.
"""

from __future__ import annotations

import signal

STACKS_SIGNAL = signal.SIGUSR2
"""Only for a process that catches it: any other would be ended by it."""
STACKS_FILE = "megatrain-stacks"
"""As the system calls it: memfd:megatrain-stacks."""
