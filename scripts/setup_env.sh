# For bash scripts:  REPO=<this repository>; . "$REPO/scripts/setup_env.sh"; setup_env [EXTRA ...]
# Sets PYTHON to an interpreter with titan_like's dependencies and those extras: the PYTHON that is set, else python3 or
# python, if it has them already (containers, clusters, an active environment); else REPO/.venv, made on first use.
# TORCH_INDEX_URL: one more package index, such as the one with builds of torch for machines without a GPU.

say() { printf '%s\n' "$*" >&2; }

setup_env() {
    local candidate found
    for candidate in "${PYTHON:-python3}" "${PYTHON:-python}"; do
        if found=$("$candidate" "$REPO/scripts/check_env.py" "$REPO/pyproject.toml" "$@" 2>/dev/null); then
            PYTHON=$found
            export PYTHONPATH="$REPO${PYTHONPATH:+:$PYTHONPATH}"  # titan_like itself comes from this folder
            return
        fi
    done
    if ! venv_is_ready "$@" && ! make_venv "$@"; then
        say "The set-up failed for the reason above. Once that is mended, run the same command again."
        return 1
    fi
    PYTHON=$REPO/.venv/bin/python
}

stamp() {  # what an environment was made from: the folder, the requirements, the extras
    printf '%s [%s]\n' "$(printf '%s\n' "$REPO" | cat - "$REPO/pyproject.toml" "$REPO/constraints.txt" | cksum)" "$*"
}

venv_is_ready() {  # an environment with more extras than are asked for is ready too
    local expected
    expected=$(stamp "$@")
    [ -x "$REPO/.venv/bin/python" ] && grep -qF "${expected%]}" "$REPO/.venv/titan_like_stamp" 2>/dev/null
}

make_venv() {  # The stamp is written last, so an interrupted installation is done again.
    local base venv=$REPO/.venv extras
    extras=$(IFS=,; printf '%s' "$*")
    base=$(find_base_python) && mkdir -p "$venv" || return
    (
        # Two first runs at once: the second waits, and then finds everything there.
        if command -v flock >/dev/null; then flock 9; fi
        if venv_is_ready "$@"; then exit; fi
        rm -f "$venv/titan_like_stamp"
        say "Setting up $venv with $("$base" --version) and the versions in constraints.txt (once; some minutes) ..."
        "$base" -m venv "$venv" &&
            "$venv/bin/python" -m pip install -qq --disable-pip-version-check \
                ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} \
                -c "$REPO/constraints.txt" -e "$REPO${extras:+[$extras]}" >&2 &&
            stamp "$@" >"$venv/titan_like_stamp" &&
            say "Set up."
    ) 9>"$venv/titan_like_lock"
}

find_base_python() {
    local candidate candidates=(python3 python python3.12 python3.11 python3.13 python3.10)
    if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' \
            >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    say "Found no Python 3.10 to 3.13 with venv and ensurepip${PYTHON:+ in PYTHON=$PYTHON}; install one (on Debian:" \
        "apt-get install python3 python3-venv) or name one with PYTHON=/path/to/python3."
    return 1
}
