"""The executor: one process a host that keeps workers, obeys the driver's rounds, and tells how its host is."""
