"""The dashboard: a web page for those who run a job, and its HTTP API.

It reads etcd and the run directory. It acts only when a person asks, and then through the driver.
"""
