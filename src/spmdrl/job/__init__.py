"""One job on this rank: the run's folder, the models and their switching, evaluations, and how they fit together."""
