"""The algorithms that train the policy, a file each."""
