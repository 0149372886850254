"""Says what a kernel did wrong."""

from __future__ import annotations


class KernelFault(AssertionError):
    """Reports an access or a use of barriers that a GPU does not allow, or gives no promise about."""
