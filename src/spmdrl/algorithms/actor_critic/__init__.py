"""Algorithms whose advantages are made of a critic's values, a file each."""
