"""Format values for people, in the same way for logs, commands and pages. Pure; imports nothing from megatrain."""
