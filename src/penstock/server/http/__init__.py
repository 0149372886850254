"""Reads bodies, and writes answers, errors, streams and the OpenAPI document."""
