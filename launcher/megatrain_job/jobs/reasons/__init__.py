"""The reasons why a job is not green, a module for each area. Pure functions of a snapshot."""
