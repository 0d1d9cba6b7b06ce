"""Algorithms that draw the policy to a teacher on the policy's own responses, a file each."""
