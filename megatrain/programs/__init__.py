"""Child processes with a parent-death guard, and their supervisor; the signals that stop a program."""
