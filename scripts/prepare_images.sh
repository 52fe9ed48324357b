#!/usr/bin/env bash
# Finds the two images that everything is built from, or makes them, and writes down what it found.
#
#   scripts/prepare_images.sh            then:  cat .gristmill/build.env >> .env; docker compose up
#
# Where the public images can be pulled there is nothing to prepare and plain `docker compose up` does. Where no
# image registry can be reached (an air gap, CI) it makes both with debootstrap from the machine's own Debian
# source, under local names. The result, with the local wheel folder and the CA bundle that pip uses on this
# machine, goes to .gristmill/build.env (git-ignored). Needs root only for debootstrap. Safe to run again.
#
# Environment: PYTHON_IMAGE, REDIS_IMAGE, WHEELHOUSE, CA_BUNDLE are taken as they are when set.
set -euo pipefail
cd "$(dirname "$0")/.."

public_python=python:3.11-slim-bookworm
public_redis=redis:7.4-bookworm
local_python=gristmill/base-python:3.11-bookworm
local_redis=gristmill/base-redis:7-bookworm
out=.gristmill/build.env

say() { printf 'prepare_images: %s\n' "$*" >&2; }
die() { printf 'prepare_images: %s\n' "$*" >&2; exit 1; }
have() { docker image inspect "$1" >/dev/null 2>&1; }

docker info >/dev/null 2>&1 || die "no Docker engine answers: run scripts/prepare_engine.sh first"

# A registry that cannot be reached may answer at once or hang: ask for the manifest, which is small, under a limit.
pull() {
    timeout 20 docker manifest inspect "$1" >/dev/null 2>&1 || return 1
    timeout 600 docker pull -q "$1" >&2
}

# --- Making the images ----------------------------------------------------------------------------------
debian_source() {
    local uri
    uri=$(sed -nE 's/^URIs:[[:space:]]*([^[:space:]]+).*/\1/p' /etc/apt/sources.list.d/debian.sources 2>/dev/null |
        grep -v security | head -n 1 || true)
    [ -n "$uri" ] || uri=$(sed -nE 's/^deb[[:space:]]+(\[[^]]*\][[:space:]]+)?([^[:space:]]+)[[:space:]].*/\2/p' \
        /etc/apt/sources.list 2>/dev/null | grep -v security | head -n 1 || true)
    printf '%s' "$uri"
}

make_python() {
    local uri tree
    uri=$(debian_source)
    [ -n "$uri" ] || die "cannot pull $public_python, and this machine has no Debian source to build one from. Load an image with Python 3.11 and name it in PYTHON_IMAGE."
    [ "$(id -u)" -eq 0 ] || die "cannot pull $public_python, and building one with debootstrap needs root. Run: sudo $0 (or name an image with Python 3.11 in PYTHON_IMAGE)"
    if ! command -v debootstrap >/dev/null; then
        say "installing debootstrap"
        { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends debootstrap; } >&2
    fi
    tree=$(mktemp -d)
    # shellcheck disable=SC2064
    trap "rm -rf '$tree'" EXIT
    say "building $local_python with debootstrap (about 80 s)"
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$tree" "$uri" >&2
    rm -rf "$tree"/var/cache/apt/archives/*.deb "$tree"/var/lib/apt/lists/*
    tar -C "$tree" --numeric-owner -c . | docker import \
        --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8' \
        --change 'CMD ["python3"]' - "$local_python" >&2
    rm -rf "$tree"
    trap - EXIT
}

# Like the public image as far as compose.yaml can see: user redis is 999:999, owns /data, and works there.
make_redis() {
    have "$local_python" || make_python
    say "building $local_redis"
    docker build -q --build-arg "BASE=$local_python" -t "$local_redis" - >&2 <<'DOCKERFILE'
ARG BASE
FROM ${BASE}
RUN groupadd --system --gid 999 redis \
 && useradd --system --uid 999 --gid redis --home-dir /data --no-create-home redis \
 && install -d -o redis -g redis /data \
 && printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d && chmod +x /usr/sbin/policy-rc.d \
 && apt-get update -q \
 && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends redis-server \
 && rm -rf /var/lib/apt/lists/* /usr/sbin/policy-rc.d
VOLUME /data
WORKDIR /data
USER redis
CMD ["redis-server"]
DOCKERFILE
}

# choose ASKED PUBLIC LOCAL MAKER: prints the name to use. Images that exist already are used, so a second run is quick.
choose() {
    local name
    if [ -n "$1" ]; then
        have "$1" || pull "$1" || die "image '$1' is neither here nor to be pulled"
        printf '%s' "$1"
        return
    fi
    for name in "$2" "$3"; do
        if have "$name"; then printf '%s' "$name"; return; fi
    done
    if pull "$2"; then printf '%s' "$2"; return; fi
    say "cannot pull $2"
    "$4"
    printf '%s' "$3"
}

python_image=$(choose "${PYTHON_IMAGE:-}" "$public_python" "$local_python" make_python)
redis_image=$(choose "${REDIS_IMAGE:-}" "$public_redis" "$local_redis" make_redis)

# --- What pip uses on this machine ----------------------------------------------------------------------
# A folder of wheels and a CA bundle, when pip is set up with one: the builds need the same.
pip_setting() { python3 -m pip config get "global.$1" 2>/dev/null || true; }
wheels=${WHEELHOUSE:-}
for candidate in "${PIP_FIND_LINKS:-}" "$(pip_setting find-links)"; do
    if [ -z "$wheels" ] && [ -n "$candidate" ] && [ -d "$candidate" ]; then wheels=$candidate; fi
done
ca=${CA_BUNDLE:-}
for candidate in "${PIP_CERT:-}" "$(pip_setting cert)" "${REQUESTS_CA_BUNDLE:-}"; do
    if [ -z "$ca" ] && [ -n "$candidate" ] && [ -f "$candidate" ]; then ca=$candidate; fi
done

mkdir -p "$(dirname "$out")"
{
    echo "# Written by scripts/prepare_images.sh: what this machine builds with. Delete it to decide again."
    echo "PYTHON_IMAGE=$python_image"
    echo "REDIS_IMAGE=$redis_image"
    [ -z "$wheels" ] || echo "WHEELHOUSE=$wheels"
    [ -z "$ca" ] || echo "CA_BUNDLE=$ca"
} >"$out.new"
mv "$out.new" "$out"
say "wrote $out: $(grep -v '^#' "$out" | tr '\n' ' ')"
