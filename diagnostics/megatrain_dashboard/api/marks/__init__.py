"""Marks on charts: incidents, checkpoints, changes of the configuration, notes and restarts of a run."""
