"""Qwen2-MoE for the Hookline inference engine."""
