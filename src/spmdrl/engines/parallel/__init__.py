"""Cuts plain modules over ranks from outside: tensors, experts, and the collectives between them."""
