"""The command `engine`: parse, call, print."""
