"""Policy -> engine weights, and the probe that proves they arrived."""
