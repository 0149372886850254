"""Describes each HTTP request: who asks, what service is due, and what the answer reports."""
