"""Keeps the KV of prompts on disk, so that a server that was restarted does not compute them again."""
