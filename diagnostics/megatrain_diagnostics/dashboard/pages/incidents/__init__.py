"""What went wrong, what was done about it, what it cost."""
