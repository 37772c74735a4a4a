"""The dashboard: a web page for those who run a job, and its HTTP API.

Reads etcd and the run directory; acts only when a person asks, and then through the driver.
"""
