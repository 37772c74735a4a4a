"""Planning: the layout of a job and the memory of each of its ranks, computed before it runs, without its machines."""
