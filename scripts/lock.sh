#!/usr/bin/env bash
# Writes scripts/locks/pyXYZ.txt anew for each supported Python. Needs `uv` and
# the network; run it when a bound in pyproject.toml changes, then run
# scripts/test.sh with each Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for version in 3.11 3.12 3.13; do
  out="scripts/locks/py${version//./}.txt"
  # From nothing, so that versions already in the file are not kept.
  {
    echo "# Python ${version}: extras demo, flywheel, plots and test, and the build backend."
    echo "# Written by scripts/lock.sh."
    uv pip compile --quiet --no-config --no-header --no-annotate \
      --no-emit-index-url --no-emit-find-links --generate-hashes \
      --python-version "${version}" --extra demo --extra flywheel \
      --extra plots --extra test \
      pyproject.toml scripts/locks/build.in
  } > "${out}.new"
  mv "${out}.new" "${out}"
done
