"""Load generator for any OpenAI-compatible server: exact token counts, one clock, every request on record."""
