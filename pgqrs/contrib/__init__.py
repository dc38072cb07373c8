"""Other people's tools, one module each; each an extra."""
