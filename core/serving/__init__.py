"""The HTTP front: an OpenAI-compatible server in one process, the engine in another."""
