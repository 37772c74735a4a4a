"""The output of workers and of the launcher: rotating files, lines on the console, and a search for failures."""
