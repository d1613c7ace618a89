"""What importing the package costs and pulls in. The import contract between its rooms is checked by `make lint`."""

from __future__ import annotations

import json
import subprocess
import sys

OPTIONAL = {"megatron", "transformer_engine", "transformer_engine_torch", "zarr"}
"""Top-level packages that are imported where they are used, never by the package root."""


def test_importing_the_package_imports_no_host() -> None:
    code = "import json, sys, megatron_fp8_dist; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    # An interpreter of its own: this one has imported everything already.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert "megatron_fp8_dist" in loaded
    assert not loaded & OPTIONAL
