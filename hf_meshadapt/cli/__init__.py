"""The command `meshadapt`; see `main`."""
