"""The checkpoints of a run, and what keeping them costs."""
