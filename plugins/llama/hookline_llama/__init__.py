"""Llama and Mistral for the Hookline inference engine."""
