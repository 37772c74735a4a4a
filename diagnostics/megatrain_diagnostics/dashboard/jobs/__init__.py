"""One server for many jobs: the list, and each job's own application, opened when somebody looks at it."""
