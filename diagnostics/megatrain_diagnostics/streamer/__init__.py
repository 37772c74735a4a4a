"""The program beside each executor: reads black boxes and logs, streams them, answers scrapes."""
