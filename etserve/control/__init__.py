"""The laws of the control loop: pure functions on floats, standard library only."""
