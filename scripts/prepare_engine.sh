#!/usr/bin/env bash
# Makes sure that a Docker engine with Compose and BuildKit answers.
#
#   scripts/prepare_engine.sh
#
# Succeeds at once if an engine already runs, as on most machines. Otherwise, on Debian and
# Ubuntu, it installs the distribution's packages and starts the daemon in the background (there may be no
# init system: containers, CI). Needs root only to install or start something. Safe to run again.
set -euo pipefail

say() { printf 'prepare_engine: %s\n' "$*"; }
die() { printf 'prepare_engine: %s\n' "$*" >&2; exit 1; }

engine_answers() { docker info >/dev/null 2>&1; }
tools_answer() { docker compose version >/dev/null 2>&1 && docker buildx version >/dev/null 2>&1; }

if engine_answers && tools_answer; then
    say "ready: engine $(docker version --format '{{.Server.Version}}'), Compose $(docker compose version --short)"
    exit 0
fi

if [ "$(id -u)" -ne 0 ]; then
    if command -v docker >/dev/null && ! engine_answers; then
        die "the docker command is here but no engine answers as user $(id -un). Start Docker, or add yourself to the docker group, or run: sudo $0"
    fi
    die "no Docker engine with Compose and buildx here, and installing one needs root. Run: sudo $0"
fi

# --- Packages -------------------------------------------------------------------------------------------
# Where the daemon's log, and nothing else of ours, goes.
log=${DOCKERD_LOG:-/var/log/gristmill-dockerd.log}

# Bookworm's own engine (20.10) cannot do named build contexts, which our builds use. Trixie's can; only these
# packages come from it, everything else stays on this machine's release.
add_newer_debian() {
    local uri keyring
    uri=$(sed -nE 's/^URIs:[[:space:]]*([^[:space:]]+).*/\1/p' /etc/apt/sources.list.d/debian.sources 2>/dev/null |
        grep -v security | head -n 1 || true)
    [ -n "$uri" ] || uri=$(sed -nE 's/^deb[[:space:]]+(\[[^]]*\][[:space:]]+)?([^[:space:]]+)[[:space:]]+bookworm[[:space:]].*/\2/p' \
        /etc/apt/sources.list 2>/dev/null | head -n 1 || true)
    [ -n "$uri" ] || die "cannot tell where this machine gets Debian packages from: no Debian source in /etc/apt. Install Docker with Compose by hand."
    keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    [ -e "$keyring" ] || die "no $keyring: apt-get install debian-archive-keyring, then run this again"
    cat >/etc/apt/sources.list.d/gristmill-trixie.sources <<SOURCE
Types: deb
URIs: $uri
Suites: trixie
Components: main
Signed-By: $keyring
SOURCE
    cat >/etc/apt/preferences.d/gristmill-trixie <<PIN
Package: *
Pin: release n=trixie
Pin-Priority: 100

Package: docker.io docker-cli docker-compose docker-buildx containerd
Pin: release n=trixie
Pin-Priority: 990
PIN
}

if ! command -v dockerd >/dev/null || ! tools_answer; then
    [ -r /etc/os-release ] || die "not a Debian or Ubuntu machine: install Docker with Compose by hand"
    # shellcheck disable=SC1091
    . /etc/os-release
    compose_package=docker-compose
    case "${ID:-} ${VERSION_CODENAME:-}" in
        "debian bookworm") add_newer_debian ;;
        debian*) ;;
        ubuntu*) compose_package=docker-compose-v2 ;;
        *) die "do not know how to install Docker on '${PRETTY_NAME:-this system}': install it with Compose by hand" ;;
    esac
    say "installing the engine, Compose and buildx from the distribution's packages"
    export DEBIAN_FRONTEND=noninteractive
    # Where no init system runs, the packages' attempt to start a service would fail the installation.
    policy=/usr/sbin/policy-rc.d
    if [ ! -d /run/systemd/system ] && [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod +x "$policy"
        trap 'rm -f "$policy"' EXIT
    fi
    apt-get update -q
    apt-get install -q -y --no-install-recommends docker.io "$compose_package" docker-buildx iptables
fi
tools_answer || die "the packages are installed, but 'docker compose version' or 'docker buildx version' fails: is another docker command earlier in PATH ($(command -v docker))?"

# --- Daemon ---------------------------------------------------------------------------------------------
if ! engine_answers; then
    if [ -d /run/systemd/system ]; then
        say "starting docker.service"
        systemctl enable --now docker
    else
        say "starting dockerd in the background (log: $log)"
        # A pid file left by a daemon that died with its machine stops the next one from starting.
        pgrep -x dockerd >/dev/null || rm -f /var/run/docker.pid /run/docker/containerd/containerd.pid
        # Its own session and no inherited descriptors: it must outlive this script and the terminal.
        setsid dockerd >>"$log" 2>&1 </dev/null &
    fi
    for _ in $(seq 60); do
        engine_answers && break
        sleep 1
    done
fi
engine_answers || { tail -n 20 "$log" >&2 || true; die "no engine answers after 60 s; the last lines of $log are above"; }
say "ready: engine $(docker version --format '{{.Server.Version}}'), Compose $(docker compose version --short)"
