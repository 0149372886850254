"""Renders Jinja chat templates, which are programs of strangers: in a sandbox, and in a process that can be killed.

Importing it costs little, because every rendering process does.
"""
