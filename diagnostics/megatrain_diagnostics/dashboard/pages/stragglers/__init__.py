"""Who makes the job slow, and what that costs."""
