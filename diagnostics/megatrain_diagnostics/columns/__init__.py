"""The tables of events in Arrow's form: as they travel, and as they lie in files."""
