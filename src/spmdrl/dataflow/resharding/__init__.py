"""The resharding flow, allgather-swap: update shards become generation shards, and come back."""
