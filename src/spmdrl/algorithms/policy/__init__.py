"""Algorithms that weigh generated tokens by the advantages of their responses, a file each."""
