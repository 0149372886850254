"""Exports metrics, under three sets of names, and traces."""
