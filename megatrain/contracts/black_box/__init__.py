"""The black box of a rank: its bytes, its values, and how to read it while the rank runs or after it exited."""
