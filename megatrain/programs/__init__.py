"""Child processes with a parent-death guard, and their supervisor; signals that ask for a stop."""
