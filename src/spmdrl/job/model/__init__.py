"""The models of a run: their sources, update shards, generation shards, and the switch between the two."""
