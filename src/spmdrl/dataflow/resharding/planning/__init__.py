"""The resharding plan: sources, targets and buckets of weight slices. Integers only."""
