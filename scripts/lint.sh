#!/usr/bin/env bash
# Runs every linter in the light lane, also when an earlier one has findings, and names those that had some.
set -uo pipefail
cd "$(dirname "$0")/.."
scripts/env.sh light dev || exit

failed=()
check() {
  echo "lint.sh: $*"
  ".venv/bin/$1" "${@:2}" || failed+=("$1 ${2:-}")
}

check ruff check .
check ruff format --check .
check mypy
check lint-imports --no-logo
[ ${#failed[@]} -eq 0 ] || { echo "lint.sh: findings by: $(IFS=,; echo "${failed[*]}")" >&2; exit 1; }
