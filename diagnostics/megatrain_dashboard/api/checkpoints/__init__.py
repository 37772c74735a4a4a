"""The checkpoints of a run, and their size."""
