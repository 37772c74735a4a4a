"""The rules by domain: one table per file, written from the messages that the programs print."""
