"""The paper as pure functions on tensors (arXiv 2507.18071): no config, no logging, torch only."""
