"""One server for many jobs: the list, and an application for each job, opened at the first request for it."""
