"""How a worker provides its Python stacks to its host: on a signal, it writes them to a file without a name.

The file is in memory, and the host finds it in the worker's list of open files, so nothing is left after the worker's
end. C code that needs no interpreter lock writes it, so even a rank that hangs in native code with the lock held
answers. telemetry/stack_dumps.py writes; the diagnosis's streamer/stacks.py requests and reads.
"""

from __future__ import annotations

import signal

STACKS_SIGNAL = signal.SIGUSR2
"""Send it only to a process that catches it: it would end any other."""
STACKS_FILE = "megatrain-stacks"
"""The system shows it as memfd:megatrain-stacks."""
