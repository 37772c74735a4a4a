"""Notes that people put on a run."""
