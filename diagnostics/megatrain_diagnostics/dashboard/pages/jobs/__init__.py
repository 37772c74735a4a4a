"""All jobs, by trouble."""
