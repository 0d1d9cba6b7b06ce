"""The models of a run: where they come from, update shards, generation shards, and the switch between the two."""
