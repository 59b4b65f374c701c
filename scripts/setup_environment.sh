# shellcheck shell=bash
# Sourced by the other scripts: afterwards `python`, `deepspeed` and the checkers are those of an environment in which
# this repository is installed with the tested set of constraints.txt.
#
# An active virtual environment is used as it is, else .venv of the repository, which is made if need be.
#   MEGATRON_LAZARUS_PYTHON    the interpreter .venv is made with, instead of python3 (also if an environment is active)
#   MEGATRON_LAZARUS_PIP_ARGS  more arguments for pip, such as --extra-index-url with PyTorch's index of CPU builds:
#                              without one, pip may choose a CUDA build of several GB

lazarus_setup() {
    local root python="${MEGATRON_LAZARUS_PYTHON:-python3}" stamp wanted
    local -a pip_arguments=()
    root="$(cd "$1" && pwd -P)" || return

    if [[ -z "${VIRTUAL_ENV:-}" || -n "${MEGATRON_LAZARUS_PYTHON:-}" ]]; then
        VIRTUAL_ENV="$root/.venv"
    fi
    if [[ ! -x "$VIRTUAL_ENV/bin/python" ]]; then
        if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            echo "The tested set needs Python 3.11 or newer: set MEGATRON_LAZARUS_PYTHON to one." >&2
            return 1
        fi
        "$python" -m venv "$VIRTUAL_ENV" || return
    fi
    export VIRTUAL_ENV PATH="$VIRTUAL_ENV/bin:$PATH"

    # The stamp comes last, so that an interrupted installation is taken up again; it names the repository because an
    # editable installation points to one.
    stamp="$VIRTUAL_ENV/.megatron_lazarus"
    wanted="$root $(cat "$root"/{setup.py,pyproject.toml,constraints.txt} | sha256sum)"
    if [[ "$(cat "$stamp" 2>/dev/null)" == "$wanted" ]]; then
        return
    fi
    echo "Installing into $VIRTUAL_ENV (once; 1.3 GB with a CPU build of torch) ..." >&2
    read -ra pip_arguments <<<"${MEGATRON_LAZARUS_PIP_ARGS:-}"
    (
        cd "$root" &&
            python -m pip install -qq --disable-pip-version-check "${pip_arguments[@]}" -c constraints.txt -e '.[test]'
    ) || return
    printf '%s' "$wanted" >"$stamp"
}

lazarus_setup "$(dirname "${BASH_SOURCE[0]}")/.."
