#!/usr/bin/env bash
# The whole story on the real Gemma 3 270M, in two processes. Flags go to
# `kvgraft demo`; the last line is its JSON.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
exec "${VENV}/bin/kvgraft" demo "$@"
