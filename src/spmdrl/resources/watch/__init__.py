"""What a job of ranks notices beside its work: requests to stop, and ranks that stand still."""
