"""A run's folder: held, resumed, logged into, and what checkpoints of it hold."""
