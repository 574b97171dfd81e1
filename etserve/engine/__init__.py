"""The step loop, the process it runs in, and the front half that the web floor talks to."""
