"""Environments reply to a model between its turns; their steps run in processes that can be killed."""
