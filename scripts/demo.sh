#!/usr/bin/env bash
# Runs the example in the lane LANE (light by default) with weights of SCHEME (float8 by default). On stdout there is the
# example's output and nothing else.
set -euo pipefail
cd "$(dirname "$0")/.."
lane=${LANE:-light}
scripts/env.sh "$lane" >&2
[ "$lane" = te ] && venv=.venv-te weights=te || venv=.venv weights=block_scaled
exec "$venv/bin/python" examples/gpt_fp8_resume.py --weights "$weights" --scheme "${SCHEME:-float8}"
