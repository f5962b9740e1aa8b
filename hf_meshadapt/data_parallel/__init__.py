"""How replicas of a stage stay one model: gradients averaged at every step, or weights at some of them."""
