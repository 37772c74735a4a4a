"""The black box of a rank: its bytes, its values, and how to read it while the rank lives or after its death."""
