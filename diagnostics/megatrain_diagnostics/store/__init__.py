"""The event store: Parquet segments that DuckDB reads, and the queries of analyses and pages."""
