"""The dialects: one folder each, and none imports another."""
