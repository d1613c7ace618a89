#!/usr/bin/env bash
# Runs the suite in the named lanes, one after another: `test.sh light te [-- PYTEST-ARGUMENTS]`.
#
# The last lines say for each lane how it went. A lane that this machine cannot have is named there, and is a failure
# only with REQUIRE_TE=1.
set -uo pipefail
cd "$(dirname "$0")/.."

lanes=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  lanes+=("$1")
  shift
done
[ $# -eq 0 ] || shift

errors=$(mktemp)
trap 'rm -f "$errors"' EXIT
summary=()
failed=0

report() {
  summary+=("$1")
  [ "$2" = ok ] || failed=1
}

for lane in "${lanes[@]}"; do
  [ "$lane" = te ] && venv=.venv-te || venv=.venv
  echo "test.sh: lane $lane"
  SECONDS=0
  scripts/env.sh "$lane" dev 2>"$errors"
  made=$?
  cat "$errors" >&2
  if [ $made -eq 3 ]; then
    [ "${REQUIRE_TE:-}" = 1 ] && verdict=failed || verdict=ok
    report "lane $lane: NOT RUN: $(tail -n 1 "$errors")" $verdict
  elif [ $made -ne 0 ]; then
    report "lane $lane: FAILED: its environment could not be made" failed
  elif "$venv/bin/python" -m pytest --lane="$lane" "$@"; then
    report "lane $lane: ok, $SECONDS s" ok
  else
    report "lane $lane: FAILED, $SECONDS s" failed
  fi
done

printf '%s\n' "${summary[@]}"
exit $failed
