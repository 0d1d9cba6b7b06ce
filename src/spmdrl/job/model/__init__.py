"""The actor: update shards, generation shards, and the switch between the two."""
