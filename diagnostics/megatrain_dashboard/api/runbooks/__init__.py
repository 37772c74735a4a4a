"""The runbooks of docs/runbooks as pages, with the names of this job in their commands."""
