"""Renders Jinja chat templates, which are untrusted programs: in a sandbox, and in a process that can be killed.

The import is cheap, because every rendering process runs it.
"""
