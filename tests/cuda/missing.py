"""What these tests need, and whether it is here."""

from __future__ import annotations

import os
from importlib.util import find_spec

import numpy as np


def why_not() -> str:
    """Why the tests cannot run here; empty when they can."""
    if find_spec("torch") is None or find_spec("triton") is None:
        return "needs torch and triton: pip install 'penstock[cuda]'"
    import torch

    if torch.cuda.is_available():
        return ""
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        return "Triton's interpreter needs numpy < 2.4"
    return ""


MISSING = why_not()
