"""The resharding plan: which slice of which weight goes where, in which bucket. Integers only."""
