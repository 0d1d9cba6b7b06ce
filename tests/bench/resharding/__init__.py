"""Resharding beside full_tensor(), and what naive resharding wastes."""
