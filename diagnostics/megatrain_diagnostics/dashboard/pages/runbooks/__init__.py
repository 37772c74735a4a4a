"""The runbooks of docs/runbooks as pages, their commands filled in for this job."""
