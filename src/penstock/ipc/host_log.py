"""Logs in an engine process as the server does that it belongs to."""

from __future__ import annotations

import logging
import os

from penstock.config import LOG_FORMAT, log_to_stderr


class JsonLines(logging.Handler):
    """Writes each record as one JSON object in one line of stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        log_to_stderr(self.format(record), record.levelname.lower())


def log_as_the_server() -> None:
    if os.environ.get(LOG_FORMAT) == "json":
        logging.basicConfig(handlers=[JsonLines()], level=logging.WARNING, format="%(message)s")
