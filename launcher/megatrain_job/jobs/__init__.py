"""The state of a running job from etcd, its interpretation, and requests to its driver."""
