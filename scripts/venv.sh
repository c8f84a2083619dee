# Sourced by the other scripts: makes a virtual environment if it is missing and installs segcal.
# Change its place with SEGCAL_VENV, the Python that makes it with PYTHON, and the file of the releases to
# install with SEGCAL_CONSTRAINTS (empty: the newest that pyproject.toml admits).
VENV="${SEGCAL_VENV:-.venv}"
CONSTRAINTS="${SEGCAL_CONSTRAINTS-scripts/constraints.txt}"
STALE=""
for file in pyproject.toml segcal/__init__.py ${CONSTRAINTS:+"$CONSTRAINTS"}; do # the second says the version
  [ -f "$file" ] || { echo "$file: no such file (SEGCAL_CONSTRAINTS)" >&2; exit 2; }
  if [ ! -f "$VENV/.installed" ] || [ "$file" -nt "$VENV/.installed" ]; then STALE=1; fi
done
if [ -n "$STALE" ]; then
  "${PYTHON:-python3}" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' ||
    { echo "segcal needs Python 3.10 to 3.13; name one with PYTHON=/path/to/python3" >&2; exit 2; }
  echo "Installing segcal into $VENV (several GB with PyTorch, some minutes)"
  [ -x "$VENV/bin/python" ] || "${PYTHON:-python3}" -m venv "$VENV"
  "$VENV/bin/python" -m pip install -qq --disable-pip-version-check \
    ${CONSTRAINTS:+--constraint "$CONSTRAINTS"} --editable ".[test]"
  touch "$VENV/.installed"
fi
PATH="$(cd "$VENV/bin" && pwd):$PATH"
export PATH
