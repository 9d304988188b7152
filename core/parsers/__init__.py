"""What reads a model's answer: tool calls and reasoning out of its text, piece by piece."""
