"""The identity of the job, and what the caller may do with it."""
