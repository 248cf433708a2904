"""The kernel lab: programs compiled for a TPU without one, their cycles, memory and traffic."""
