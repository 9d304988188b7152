"""Measuring the engine: workloads, clocks, what physics allows, and reports. `engine bench` and `benchmarks/gpu.py`."""
