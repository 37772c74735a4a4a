"""Analyses that compute findings from events, without access to files, sockets, clocks or etcd."""
