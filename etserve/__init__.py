"""Entropic-time inference: a language-model server steered by its own uncertainty.

Importing the package stays light: no torch, no web, no native module.
"""

__version__ = "0.1.0"
