"""The executor: one process per host that runs workers, obeys the driver's rounds, and reports the host's state."""
