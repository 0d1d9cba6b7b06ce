"""Which job a folder of a run belongs to: a lock while it runs, and a token that outlives the lock."""
