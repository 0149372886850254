"""Reads the request fields that dialects share, and computes the answers they write."""
