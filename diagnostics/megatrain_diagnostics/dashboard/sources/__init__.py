"""Where answers come from: a running job (etcd and run directory), or a recorded one (run directory alone)."""
