"""Turns a PyTorch checkpoint into a Colibri .bin, without PyTorch and without executing anything in it."""
