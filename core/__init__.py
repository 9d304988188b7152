"""Hookline."""
