"""State of training frameworks, described as boxes of global tensors."""
