"""What happened to a run, as marks on charts: incidents, checkpoints, changes of the configuration, notes, restarts."""
