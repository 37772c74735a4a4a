"""All ranks on their grid, one rank, and who holds up a hang."""
