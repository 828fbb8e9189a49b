"""The folder of compiled code that the test runs of one state of the sources share."""

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import time

import torch
from support.paths import ROOT


class CompilerCache:
    """Keeps compiled code for the next test run if torch, this library and the processor are
    unchanged: a stale graph would hide what a change breaks.

    A rank that was killed while it compiled may have left half a file. Each run therefore leaves a
    mark in the folder and removes the mark if it ends well. A run that has the folder to itself
    empties it if a mark is left.
    """

    def __init__(self):
        caches = ROOT / "build" / "compiled-by-tests"
        self.folder = caches / self._digest()
        self.folder.mkdir(parents=True, exist_ok=True)
        os.utime(self.folder)
        for other in caches.iterdir():
            if time.time() - other.stat().st_mtime > 7 * 86400:
                shutil.rmtree(other, ignore_errors=True)
        self._lock = open(caches / f"{self.folder.name}.lock", "w")  # noqa: SIM115 (for ever)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if any(self.folder.glob("unfinished-*")):
                shutil.rmtree(self.folder)
                self.folder.mkdir()
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        self._mark = self.folder / f"unfinished-{os.getpid()}"
        self._mark.touch()

    @staticmethod
    def _digest():
        digest = hashlib.sha256(f"{torch.version.git_version} {platform.machine()}".encode())
        digest.update(torch.backends.cpu.get_cpu_capability().encode())
        for pattern in ("deepcompile_zero3/**/*.py", "csrc/**/*.*"):
            for path in sorted(ROOT.glob(pattern)):
                digest.update(path.read_bytes())
        return digest.hexdigest()[:16]

    def end_well(self):
        self._mark.unlink(missing_ok=True)
