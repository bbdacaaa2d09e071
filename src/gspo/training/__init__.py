"""From rollouts to better weights: optimizer, trainer, checkpoints and the loop."""
