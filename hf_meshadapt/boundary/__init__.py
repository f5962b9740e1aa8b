"""What crosses the boundary between two model chunks: masks, codecs and the modules that apply them in graph."""
