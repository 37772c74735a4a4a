"""The reasons why a job is not green, a file for each thing that can go wrong. Pure functions of a snapshot."""
