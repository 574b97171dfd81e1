"""What `make gpu-check` runs."""
