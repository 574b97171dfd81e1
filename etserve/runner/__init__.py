"""Runs what the scheduler planned: batch building, forward pass, sampling. Imports of torch stay inside the modules."""
