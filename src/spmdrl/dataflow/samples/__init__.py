"""The sample flow, a distributed transfer dock: a warehouse per node, and on every rank a controller per worker
state."""
