"""Exports metrics, under the names of several engines, and traces."""
