"""Running the model: the runner, the cache on the device, and the choice of tokens."""
