"""The executor: one process per host that runs the workers of the driver's rounds and reports the host's state."""
