"""The command `megatrain annotate`, and code for all commands about a job: etcd's options, and finding the job."""
