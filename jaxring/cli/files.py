"""Files that commands write: refused before the work of which they shall tell, not after it."""

from __future__ import annotations

import os
from pathlib import Path

from jaxring import errors


def require_writable(what: str, path: Path) -> None:
    """UsageError, beginning with `what`, if a file of this name can't be written."""
    folder = path.parent
    if path.is_dir():
        problem = "is a folder"
    elif not folder.is_dir():
        problem = f"lies in no folder: there is no {folder}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        problem = "cannot be written here"
    else:
        return
    raise errors.UsageError(f"{what}: {path} {problem}; name a file in a folder of yours")
