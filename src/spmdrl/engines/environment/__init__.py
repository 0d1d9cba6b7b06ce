"""Environments answer a model between its turns; their steps run where they can be killed."""
