"""What each host does, and what keeps it from training."""
