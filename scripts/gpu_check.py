"""Check and time segcal's kernels on this machine's GPU: the same as ``segcal doctor --gpu``.

python scripts/gpu_check.py -o gpu.json
"""

from __future__ import annotations

import sys

from segcal.commands.main import app

if __name__ == "__main__":
    app(["doctor", "--gpu", *sys.argv[1:]], prog_name="segcal")
