"""One job on this rank: the run's folder, the models and their switching, evaluations, and their assembly."""
