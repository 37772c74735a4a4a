"""The rules by domain: one table a file, written from what the programs print."""
