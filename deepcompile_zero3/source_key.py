"""The sources of this package: what a process runs, and what keys of stored graphs say it ran."""

import functools
import hashlib
import warnings
from pathlib import Path

_PACKAGE = Path(__file__).parent


def source_key() -> str:
    """Returns a hash of the names and contents of the Python files, as they are now."""
    found = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # an editor's lock, or somebody is changing the files
            continue
        found.update(f"{path.relative_to(_PACKAGE)}\0{len(content)}\0".encode() + content)
    return found.hexdigest()


AT_IMPORT = source_key()


@functools.cache
def is_unchanged() -> bool:
    """Returns whether all that a compilation runs is of the sources at import. Warns if not.

    Ask once these modules are loaded. They may be loaded long after the package, whose files
    somebody may have changed in between.
    """
    if source_key() == AT_IMPORT:
        return True
    warnings.warn(
        f"the files of {_PACKAGE} have changed since this process imported them: each rank "
        "compiles its graphs, and none is stored for other jobs. Start the job again",
        stacklevel=2,
    )
    return False
