"""All jobs, those in trouble first."""
