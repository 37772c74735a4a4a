"""The operations of chosen ranks over the time of some steps."""
