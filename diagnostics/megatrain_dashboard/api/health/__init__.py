"""Whether the server is up."""
