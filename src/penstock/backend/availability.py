"""Says why what would compute fastest cannot be used."""

from __future__ import annotations

import logging
import runpy
from importlib.util import find_spec
from pathlib import Path

log = logging.getLogger(__name__)

NO_NATIVE = (
    "it was not built when Penstock was installed, because there was no C++ compiler; install one (on Debian and "
    "Ubuntu the package g++, on Fedora gcc-c++, on macOS `xcode-select --install`), then install Penstock again"
)


def warn_of_numpy() -> None:
    """Logs that NumPy computes, and what to install."""
    log.warning("NumPy computes, which is slow, since there is no native code: %s", NO_NATIVE)


def why_no_cuda() -> str:
    """Returns why torch cannot use the GPU, and logs it because the CPU computes then; empty if torch can."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    reason = ""
    if runpy.run_path(str(Path(spec.origin).with_name("version.py"))).get("cuda") is None:
        reason = "this torch was built without CUDA"  # known without importing it, which takes seconds
    else:
        from penstock.backend.cuda import gpu_count

        if not gpu_count():
            reason = "torch finds none it can use: `nvidia-smi` may say why"
    if reason:
        log.warning("there is an NVIDIA GPU, but %s; the CPU computes (--device cuda makes this an error)", reason)
    return reason
