"""The command `megatrain annotate`, and what all commands about a job share: the flags of etcd, and finding the job."""
