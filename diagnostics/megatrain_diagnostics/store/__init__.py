"""The event store: Parquet segments that DuckDB reads, and a ring of the newest steps in memory."""
