"""The timeline: the operations of chosen ranks during some steps."""
