"""The sources of responses: a running job (etcd and run directory), or a recorded one (only the run directory)."""
