"""One job on this rank: the run's folder, the actor and its switching, evaluations, and how they are put together."""
