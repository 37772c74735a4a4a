"""The launcher: one executor a host, an elected driver, and rounds that name who trains.

It imports the trainer's contracts, coordination, failures and config, and torch.distributed.elastic; never the trainer.
"""
