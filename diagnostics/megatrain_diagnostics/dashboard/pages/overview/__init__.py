"""How the job is, how fast it is, and when it ends."""
