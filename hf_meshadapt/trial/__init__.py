"""A recipe tried on the emulated mesh before a mesh is rented: dense and coded runs side by side, and a recommendation."""
