"""What etcd tells of a running job, what that means, and asking its driver for something."""
