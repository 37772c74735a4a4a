"""The files of a checkpoint and of a series of checkpoints, on a local disk or in an object store. Without torch."""
