"""The commands: options in, text out. What they do lives on the floors below."""
