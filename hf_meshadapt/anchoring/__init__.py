"""What a trainer does for the anchor circuit: nothing, the anchor's work itself, one end of the link or the other."""
