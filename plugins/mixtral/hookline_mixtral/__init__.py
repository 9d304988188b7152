"""Mixtral for the Hookline inference engine."""
