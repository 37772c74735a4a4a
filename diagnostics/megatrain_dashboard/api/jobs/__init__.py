"""All jobs, the most severe first."""
