"""What benches share: ranks, emulated nodes, other programs, rounds, models and tables."""
