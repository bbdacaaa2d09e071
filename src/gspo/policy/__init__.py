"""The model being trained: loading, attention over packed groups, the forward pass and its check at start."""
