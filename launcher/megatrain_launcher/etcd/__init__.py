"""An etcd of the job's own: its program, files, users and certificate."""
