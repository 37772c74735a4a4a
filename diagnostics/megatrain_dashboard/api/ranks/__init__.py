"""The picture of all ranks, the details of one rank, and the culprits of a hang."""
