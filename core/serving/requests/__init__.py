"""From a body to a request that the engine takes: one door for all routes."""
