"""Rollouts and responses on disk, and reports on a step's samples."""
