"""The reasons why a job is not green, a file for each area. Pure functions of a snapshot."""
