"""Which tokens run next, and in which cache blocks. Pure Python: nothing here imports torch."""
