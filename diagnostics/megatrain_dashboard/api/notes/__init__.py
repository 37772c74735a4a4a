"""Notes that people write on a run."""
