"""How a worker provides its Python stacks to its host: on a signal, it writes the stacks to an unnamed file.

The file is in memory, and the host finds it in the worker's list of open files, so nothing is left after the worker
exits. C code that needs no interpreter lock writes the file, so even a rank that hangs in native code with the lock
held responds. telemetry/stack_dumps.py writes; the diagnosis's streamer/stacks.py requests and reads.
"""

from __future__ import annotations

import signal

STACKS_SIGNAL = signal.SIGUSR2
"""It is sent only to a process that handles it, because it would kill any other process."""
STACKS_FILE = "megatrain-stacks"
"""Name of the file; the system shows memfd:megatrain-stacks."""
