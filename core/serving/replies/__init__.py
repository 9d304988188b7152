"""From what the engine gives to what a client is sent."""
