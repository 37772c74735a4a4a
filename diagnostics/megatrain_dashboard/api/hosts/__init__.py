"""The state of each host, and what keeps it from training."""
