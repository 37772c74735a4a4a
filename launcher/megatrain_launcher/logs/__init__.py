"""The output of workers and of the launcher: its rotating files, its lines on the console, the logs of failures."""
