"""The files of a run directory, and the right to write to it."""
