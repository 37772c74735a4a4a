"""The tables of events in Arrow's form, on the wire and in files."""
