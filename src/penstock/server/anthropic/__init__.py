"""Implements Anthropic's messages."""
