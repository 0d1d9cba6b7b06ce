"""What benches share: commands run to their end, and tables."""
