"""The anchor circuit: stale weights go out, gradients of unmasked passes come back, and the training loop never waits."""
