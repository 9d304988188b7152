"""The engine in a process of its own, and the end of it that the HTTP process holds."""
