"""The error of a thread that cannot be started: the system has a limit on threads, or no memory for one more stack."""

from __future__ import annotations

from megatrain.contracts.errors import MegatrainError


def thread_error(subject: str, error: RuntimeError, hint: str) -> MegatrainError:
    """Return the error to raise in place of Python's, which names neither the thread nor the limit.

    subject: the thread, as in "the thread that reads". hint: what to do.
    """
    limits = "the user or the container may have too many threads: see `ulimit -u` and pids.max"
    return MegatrainError(f"{subject} could not be started: {error} ({limits}); {hint}")
