"""Transport of payload: in place within a node, point to point at stage boundaries, by request otherwise."""
