"""Serves one model on many replicas: decides which replica answers a request, and simulates how that goes."""

MOST_REPLICAS = 10_000
