"""The machine room: supervision, worker processes, network and sandbox; it knows nothing of RL."""
