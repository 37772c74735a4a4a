"""The tables of events as Arrow data, on the wire and in files."""
