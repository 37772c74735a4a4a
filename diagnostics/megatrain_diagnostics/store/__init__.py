"""The event store: Parquet segments, read by DuckDB, and the queries of the analyses and the dashboard."""
