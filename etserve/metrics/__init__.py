"""The Prometheus view of what the engine reports and what the web floor times. Knows no HTTP."""
