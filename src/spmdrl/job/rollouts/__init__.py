"""Rollouts and answers on disk, and what is reported of a step's samples."""
