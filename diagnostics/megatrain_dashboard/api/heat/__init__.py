"""The heat map: a row for each rank or host, a column for each step."""
