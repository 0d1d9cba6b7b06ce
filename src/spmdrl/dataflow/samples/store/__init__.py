"""A node's warehouse: the payload of its rows in memory that all its ranks share."""
