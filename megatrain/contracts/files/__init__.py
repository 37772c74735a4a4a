"""Files that several programs use at once: locks, whole and line files, and reading what others may have changed."""
