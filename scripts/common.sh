# Sourced by the other scripts. Sets ROOT, VENV and VENV_PYTHON, and leaves in
# VENV what the lock file of this Python names and the project itself.
#
#   PYTHON        interpreter to use, 3.11 to 3.13 (else the first one found)
#   KVGRAFT_VENV  folder of the environment (else .venv-X.Y in the checkout)
#
# Touches the network only when the environment is new or its lock changed.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

say() { echo "kvgraft: $*" >&2; }

find_python() {
  local candidate
  local check='import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'
  for candidate in ${PYTHON:+"${PYTHON}"} \
      python3 python3.13 python3.12 python3.11 python; do
    if "${candidate}" -c "${check}" > /dev/null 2>&1; then
      echo "${candidate}"
      return
    fi
    if [[ -n "${PYTHON:-}" ]]; then
      say "PYTHON=${PYTHON} is not a Python 3.11 to 3.13; name another one"
      return 1
    fi
  done
  say 'no Python 3.11 to 3.13 on PATH; install one or set PYTHON=/path/to/it'
  return 1
}

# One hash over the names and bytes of the project's installed files.
source_hash() {
  (
    cd "${ROOT}"
    find kvgraft_jax pyproject.toml README.md LICENSE -type f \
      ! -name '*.pyc' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
  ) | sha256sum | cut -d' ' -f1
}

# Runs pip; shows what it said only when it failed.
quiet_pip() {
  local log
  log="$(mktemp)"
  if ! "${VENV_PYTHON}" -m pip "$@" > "${log}" 2>&1; then
    cat "${log}" >&2
    rm -f "${log}"
    return 1
  fi
  rm -f "${log}"
}

prepare_venv() {
  local python version lock lock_hash project_hash
  python="$(find_python)" || return 1
  version="$("${python}" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
  lock="${ROOT}/scripts/locks/py${version//./}.txt"
  VENV="${KVGRAFT_VENV:-${ROOT}/.venv-${version}}"
  VENV_PYTHON="${VENV}/bin/python"
  mkdir -p "${VENV}" || return 1
  VENV="$(cd "${VENV}" && pwd)"
  VENV_PYTHON="${VENV}/bin/python"

  # Two scripts at once must not build one environment together.
  if command -v flock > /dev/null; then
    exec 9> "${VENV}.lock" || return 1
    flock 9 || return 1
  fi

  lock_hash="$(sha256sum < "${lock}" | cut -d' ' -f1)"
  if [[ "$(cat "${VENV}/.kvgraft-lock" 2> /dev/null)" != "${lock_hash}" ]]; then
    if [[ ! -e "${VENV}/.kvgraft-venv" && -n "$(ls -A "${VENV}")" ]]; then
      say "${VENV} is not empty and was not made by these scripts; set" \
        'KVGRAFT_VENV to a new folder'
      return 1
    fi
    say "installing $(basename "${lock}") into ${VENV}; this takes minutes"
    # The marker first: a build that was cut short may be wiped.
    touch "${VENV}/.kvgraft-venv" || return 1
    rm -rf "${VENV}/.kvgraft-lock" "${VENV}/.kvgraft-source" \
      "${VENV}/bin" "${VENV}/lib" "${VENV}/lib64" "${VENV}/include"
    if ! "${python}" -m venv "${VENV}"; then
      say "${python} has no working venv module; on Debian: apt install" \
        'python3-venv'
      return 1
    fi
    quiet_pip install --disable-pip-version-check --require-hashes \
      -r "${lock}" || return 1
    echo "${lock_hash}" > "${VENV}/.kvgraft-lock"
  fi

  project_hash="$(source_hash)"
  if [[ "$(cat "${VENV}/.kvgraft-source" 2> /dev/null)" != "${project_hash}" ]]
  then
    rm -f "${VENV}/.kvgraft-source"
    quiet_pip install --disable-pip-version-check --no-index --no-deps \
      --no-build-isolation --force-reinstall "${ROOT}" || return 1
    echo "${project_hash}" > "${VENV}/.kvgraft-source"
  fi
  if command -v flock > /dev/null; then
    exec 9>&-
  fi
}

prepare_venv || exit 1
