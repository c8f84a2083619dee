#!/usr/bin/env bash
# Installs segcal into .venv if needed and runs the tests, one process a core; arguments go to pytest,
# e.g. -m "not slow", or -n 0 for one process alone.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
export OMP_WAIT_POLICY=PASSIVE # waiting threads of one process must not keep the others from work
exec python -m pytest -n auto --dist loadfile "$@"
