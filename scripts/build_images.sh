#!/usr/bin/env bash
# Builds the images of all services with this machine's settings, at the same time.
#
#   scripts/build_images.sh
#   IMAGE_REGISTRY=registry.example/me TAG=1 scripts/build_images.sh     under the names of a registry, for docker compose push
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/prepare_engine.sh
scripts/prepare_images.sh
# Compose builds one image after the other. The builder runs a step that two images share once.
builds=()
trap '[ ${#builds[@]} = 0 ] || kill "${builds[@]}" 2>/dev/null || true' EXIT
settings=(--env-file .gristmill/build.env)
[ ! -f .env ] || settings=(--env-file .env "${settings[@]}")
for service in model trainer env api sandbox; do
    docker compose --profile sandbox "${settings[@]}" build "$service" &
    builds+=($!)
done
for _ in "${builds[@]}"; do wait -n; done
