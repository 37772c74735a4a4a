"""The dashboard: a web page for those who run a job, and its HTTP API. Reads etcd and the run directory; acts only on request."""
