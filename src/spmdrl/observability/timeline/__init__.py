"""The timeline of each rank: its stages, traffic and memory, and a Perfetto trace of them."""
