"""Actions that people request through the page. Each is checked, rate-limited and audited, and then sent to the driver
or written to etcd.
"""
