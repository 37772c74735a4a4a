"""The stragglers of the job, and what they cost."""
