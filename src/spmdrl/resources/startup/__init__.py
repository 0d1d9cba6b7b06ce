"""Start, rendezvous and agreement of ranks."""
