"""Who the job is, and what the asking person may do with it."""
