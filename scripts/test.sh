#!/usr/bin/env bash
# Installs segcal into .venv if needed and runs the tests; arguments go to pytest, e.g. -m "not slow".
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
exec python -m pytest "$@"
