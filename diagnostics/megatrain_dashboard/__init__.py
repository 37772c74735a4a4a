"""The dashboard: a web page for the people who run a job, and its HTTP API.

The dashboard reads etcd and the run directory. It acts only at the request of a person, and then through the driver.
"""
