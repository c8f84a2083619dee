#!/usr/bin/env bash
# Installs the lowest releases that pyproject.toml admits, on the oldest Python, and runs the fast tests with them.
# Arguments go to pytest. PYTHON names a Python 3.10, SEGCAL_VENV the environment (default: .venv-lowest).
set -euo pipefail
cd "$(dirname "$0")/.."
VENV="${SEGCAL_VENV:-.venv-lowest}"
python="${PYTHON:-python3.10}"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 10))' ||
  { echo "$python is not Python 3.10; name one with PYTHON=/path/to/python3.10" >&2; exit 2; }
[ -x "$VENV/bin/python" ] || "$python" -m venv "$VENV"
"$VENV/bin/python" -m pip install -qq --disable-pip-version-check uv
"$VENV/bin/uv" pip install --quiet --python "$VENV/bin/python" --resolution lowest-direct --editable ".[test]"
PATH="$(cd "$VENV/bin" && pwd):$PATH"
export PATH OMP_WAIT_POLICY=PASSIVE # waiting threads of one process must not keep the others from work
exec python -m pytest -n auto --dist loadfile -m "not slow" "$@"
