"""The launcher: one executor per host, an elected driver, and rounds that name the hosts that train.

It imports megatrain_job, layers 0 to 2 of megatrain, the modules that all commands share, and torch.distributed; never
the trainer.
"""
