"""Tests of layer 2."""
