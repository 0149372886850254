"""Moves KV blocks between engines: one offers its blocks, another reads and verifies them."""
