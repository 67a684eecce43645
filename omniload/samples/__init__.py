"""From rows to samples: transforms, tokens, loss masks, pieces."""
