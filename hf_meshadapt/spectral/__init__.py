"""Anchor priors as low-rank factors, and the optimizer wrapper that corrects gradients with them."""
