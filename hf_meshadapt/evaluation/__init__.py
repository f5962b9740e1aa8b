"""lm-eval on saved models: in a process of its own, with tasks that work without the Hub beside lm-eval's own."""
