"""Turns findings of the live analyses into verdicts for the driver, and limits their number."""
