"""The files of a run directory, and the locks and claims that permit one round to write to it."""
