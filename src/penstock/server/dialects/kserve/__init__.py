"""Serves the KServe v2 protocol, with Triton's generate extension."""
