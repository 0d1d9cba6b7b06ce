"""Nouns that every layer shares."""
