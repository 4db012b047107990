#!/usr/bin/env bash
# Checks everything: lint, types, then the tests against the installed package.
#
#   scripts/test.sh                    everyday: without the tests marked slow
#   scripts/test.sh --all              with them
#   scripts/test.sh -k rope            other arguments go to pytest
#   scripts/test.sh tests/rope_test.py so do paths, from the current folder
set -euo pipefail
started="${SECONDS}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

selection=(-m 'not slow')
arguments=()
paths=()
for argument in "$@"; do
  if [[ "${argument}" == --all ]]; then
    selection=()
  elif [[ "${argument}" != -* && -e "${argument%%::*}" ]]; then
    file="${argument%%::*}"
    folder="$(cd "$(dirname "${file}")" && pwd)"
    paths+=("${folder}/$(basename "${file}")${argument#"${file}"}")
  else
    arguments+=("${argument}")
  fi
done
if [[ ${#paths[@]} -eq 0 ]]; then
  paths=("${ROOT}/tests")
fi

scratch="$(mktemp -d)"
trap 'rm -rf "${scratch}"' EXIT
failed=()

step() {
  local name="$1"
  shift
  echo "== ${name}"
  "$@" || failed+=("${name}")
}

in_root() { (cd "${ROOT}" && "$@"); }

# From an empty folder, so that `kvgraft_jax` is the installed one.
tests() {
  (
    cd "${scratch}"
    "${VENV_PYTHON}" -m pytest -c "${ROOT}/pyproject.toml" \
      --rootdir "${ROOT}" -p no:cacheprovider \
      ${selection[@]+"${selection[@]}"} ${arguments[@]+"${arguments[@]}"} \
      "${paths[@]}"
  )
}

step ruff in_root "${VENV_PYTHON}" -m ruff check --quiet --no-cache .
step mypy in_root "${VENV_PYTHON}" -m mypy \
  --cache-dir "${VENV}/mypy_cache" kvgraft_jax
step pytest tests

echo "== $((SECONDS - started)) s in all"
if [[ ${#failed[@]} -gt 0 ]]; then
  echo "== failed: ${failed[*]}"
  exit 1
fi
echo '== all passed'
