#!/usr/bin/env bash
# Renews scripts/constraints.txt with the newest releases that pyproject.toml admits, for all declared Pythons and
# platforms. Needs uv (pip install uv). Arguments go to `uv pip compile`, e.g. --constraint FILE.
set -euo pipefail
cd "$(dirname "$0")/.."
new="$(mktemp)"
trap 'rm -f "$new"' EXIT
grep "^#" scripts/constraints.txt > "$new"
uv pip compile pyproject.toml --extra test --universal --python-version 3.10 --strip-extras \
  --no-annotate --no-header --quiet "$@" >> "$new"
cp "$new" scripts/constraints.txt
