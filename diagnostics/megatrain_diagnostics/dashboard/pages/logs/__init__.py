"""Log lines of all ranks, and what they say of a failure."""
