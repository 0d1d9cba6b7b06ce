# Sourced by the scripts beside it, from the root of the clone: makes .venv ready and shares the cores among ranks.
# A script that sets `venv` before has another folder for its environment.
#
#   PYTHON=python3.12   the interpreter that .venv is made with (default: the first fit one on PATH)
#   SPMDRL_TORCH=cpu    PyTorch's CPU build (default: what pip takes for this platform)

venv=${venv:-.venv}

say() { printf '[setup] %s\n' "$*"; }
fail() { printf '[setup] %s\n' "$*" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10 python}; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.10 to 3.13 with the venv module among: ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10 python};" \
        "install one (on Debian and Ubuntu: apt install python3-venv), or name it: PYTHON=/path/to/python3"
}

# Quiet but for errors; on a terminal a line that counts the seconds, where pip would be silent for minutes.
pip_install() {
    local ticker='' status=0 started=$SECONDS
    if [ -t 1 ]; then
        # Ends with the script: a background job isn't reached by Ctrl-C.
        while sleep 2 && kill -0 $$ 2> /dev/null; do
            printf '\r[setup] ... %d s, %s in %s ' "$((SECONDS - started))" "$(du -sh "$venv" 2> /dev/null | cut -f1)" "$venv"
        done &
        ticker=$!
    fi
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check "$@" || status=$?
    if [ -n "$ticker" ]; then
        kill "$ticker" 2> /dev/null
        wait "$ticker" 2> /dev/null || true
        printf '\r\033[K'
    fi
    return "$status"
}

# prepare_environment EXTRA: installs the clone with an extra of setup.cfg ('' for none), unless that is done already.
prepare_environment() {
    local extra=$1 torch=${SPMDRL_TORCH:-default} stamp state python
    case $torch in
        default | cpu) ;;
        *) fail "SPMDRL_TORCH is '$torch', but must be cpu or unset; for another build, install torch into $venv first" ;;
    esac
    state="torch=$torch setup.cfg=$(cksum < setup.cfg)"
    # What dev brings holds for every other call too.
    for stamp in "$venv/installed-dev" "$venv/installed-${extra:-run}"; do
        if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ]; then
            return
        fi
    done
    if ! "$venv/bin/python" -m pip --version > /dev/null 2>&1 || [ "$(cat "$venv/torch-build" 2> /dev/null || echo "$torch")" != "$torch" ]; then
        python=$(find_python)
        say "making $venv with $("$python" --version)"
        "$python" -m venv --clear "$venv"
    fi
    echo "$torch" > "$venv/torch-build"
    if [ "$torch" = cpu ]; then
        say "installing PyTorch's CPU build"
        pip_install --index-url https://download.pytorch.org/whl/cpu "$(sed -n 's/^ *\(torch[<>=].*\)$/\1/p' setup.cfg)"
    fi
    say "installing spmdrl${extra:+[$extra]} and what it needs; the first time takes a few minutes"
    pip_install --editable ".${extra:+[$extra]}"
    echo "$state" > "$stamp"
    say "ready"
}

# layer_environment FOLDER: makes an environment that has all of .venv behind its own packages, whose folder it prints.
layer_environment() {
    local own
    .venv/bin/python -m venv --clear --without-pip "$1"
    own=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    .venv/bin/python -c 'import sys; print(*(path for path in sys.path if "-packages" in path), "'"$PWD/src"'", sep="\n")' \
        > "$own/shared.pth"
    echo "$own"
}

# share_cores RANKS: threads for each of so many ranks on this node; waiting threads leave their core to others.
share_cores() {
    local cores
    cores=$(getconf _NPROCESSORS_ONLN)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > $1 ? cores / $1 : 1))}
    export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
}

# The folder of a run named $1: that of `run.dir=` among the other arguments, else a new one, with how to go on in it.
run_folder() {
    local name=$1 folder word words=()
    shift
    folder=runs/$name-$(date +%Y%m%d-%H%M%S)
    for word in "$@"; do
        case $word in run.dir=*) folder=${word#run.dir=} ;; *) words+=("$word") ;; esac
    done
    words+=("run.dir=$folder")
    say "if it is stopped, this goes on: bash launch/$name.sh$(printf ' %q' "${words[@]}")" >&2
    echo "$folder"
}
