"""Log lines of all ranks, and the failures that they show."""
