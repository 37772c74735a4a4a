"""The health of the job, its speed, and when it ends."""
