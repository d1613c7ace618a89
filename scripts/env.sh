#!/usr/bin/env bash
# Makes the environments: `env.sh light [dev]` -> .venv, `env.sh te [dev]` -> .venv-te.
#
# Each step runs once: it leaves a stamp with the checksum of the file that it is made from, so that an edited file runs
# its step again and a finished environment costs nothing. Exit status 3: this machine cannot have the te lane (no
# Linux, no Python 3.12, or no C++ compiler); the reason is the last line on stderr.
set -euo pipefail
cd "$(dirname "$0")/.."

cannot() {
  echo "env.sh: the te lane cannot be had here: $*" >&2
  exit 3
}

# A pyenv shim may be on PATH and fail, so each candidate is run before it is believed.
find_python312() {
  local candidate
  for candidate in "${PYTHON312:-}" python3.12 "$(pyenv root 2>/dev/null || true)"/versions/3.12*/bin/python \
    "$(uv python find 3.12 2>/dev/null || true)"; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; assert sys.version_info[:2] == (3, 12)' 2>/dev/null; then
      echo "$candidate"
      return 0
    fi
  done
  return 1
}

# step VENV NAME FILE PIP-ARGUMENTS...: pip install, unless the stamp NAME says that it was done for this FILE
step() {
  local venv=$1 name=$2 file=$3 stamp sum
  shift 3
  stamp=$venv/.steps/$name
  sum=$(cksum <"$file")
  [ "$(cat "$stamp" 2>/dev/null)" != "$sum" ] || return 0
  echo "env.sh: $venv: installing $name"
  rm -f "$stamp"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
  mkdir -p "$venv/.steps"
  echo "$sum" >"$stamp"
}

# requirements VENV NAME [PIP-ARGUMENTS...]: install requirements/NAME.txt
requirements() {
  local venv=$1 name=$2 file=requirements/$2.txt
  shift 2
  step "$venv" "$name" "$file" "$@" -r "$file"
}

make_venv() {
  local venv=$1 python=$2
  [ -x "$venv/bin/python" ] && "$venv/bin/python" -c 'import pip' 2>/dev/null && return 0
  rm -rf "$venv"
  echo "env.sh: $venv: creating with $("$python" --version)"
  "$python" -m venv "$venv"
}

light() {
  make_venv .venv "${PYTHON:-python3}"
  requirements .venv light
}

te() {
  if [ ! -e .venv-te/bin/python ]; then
    local python
    [ "$(uname -s)" = Linux ] || cannot "Transformer Engine is built for Linux only"
    python=$(find_python312) || cannot "no Python 3.12 (set PYTHON312 to one)"
    command -v c++ >/dev/null || cannot "no C++ compiler"
    make_venv .venv-te "$python"
  fi
  requirements .venv-te te-base
  requirements .venv-te te
  local nvidia
  nvidia=$(.venv-te/bin/python -c 'import nvidia; print(list(nvidia.__path__)[0])')
  CPATH=$(find "$nvidia" -maxdepth 2 -name include -type d | tr '\n' ':') CUDA_HOME=$nvidia/cu13 \
    NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS=$(nproc) PATH=$PWD/.venv-te/bin:$PATH \
    requirements .venv-te te-ext --no-build-isolation --no-deps
  requirements .venv-te te-megatron
}

case "${1:-}" in
  light) light; venv=.venv ;;
  te) te; venv=.venv-te ;;
  *) echo "usage: env.sh light|te [dev]" >&2; exit 2 ;;
esac
step "$venv" package pyproject.toml --no-deps --no-build-isolation --editable .
if [ "${2:-}" = dev ]; then requirements "$venv" dev; requirements "$venv" oracles --no-deps; fi
