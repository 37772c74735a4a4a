"""The records of a job in etcd, which launcher, driver, diagnosis and dashboard exchange, and their codec."""
