"""The HTTP face: OpenAI's protocol, a strict edge, health, metrics. Sees the engine through engine/client.py only."""
