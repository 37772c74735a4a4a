"""Prometheus metrics of a host and of the daemon."""
