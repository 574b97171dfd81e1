"""Decoders, their descriptions and the checkpoints they are loaded from. Importing the package imports no torch."""
