"""Moves KV blocks between engines: one offers what it holds, another reads and verifies it."""
