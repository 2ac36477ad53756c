"""A source tree that was not built, or a Python it was not built for."""

import subprocess
import sys


def test_import_says_it_in_one_sentence():
    program = "import sys; sys.modules['jaxring._native'] = None; import jaxring"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: jaxring's native module is missing for Python 3.")
    assert "install jaxring with this Python (pip install .)" in last
    assert "During handling" not in done.stderr
    assert "direct cause" not in done.stderr
