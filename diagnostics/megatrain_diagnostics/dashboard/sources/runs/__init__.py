"""Many runs at a glance: what each directory and each etcd tells, in bounded time."""
