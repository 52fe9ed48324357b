#!/usr/bin/env bash
# Installs a program that tests need, from the packages of Debian or Ubuntu.
#
#   scripts/prepare_package.sh prometheus   with promtool, for the tests of compose/monitoring/
#   scripts/prepare_package.sh chromium     for the tests of the page
#   scripts/prepare_package.sh redis-tools  with a Redis that supports TLS, for tests/integration/api/test_external_redis.py
#   scripts/prepare_package.sh slurm        slurmctld, slurmd, slurm-client and munge, for the tests of docs/clusters.md
#
# Succeeds at once if the programs exist. If this script cannot install them, it logs the reason, and the tests that
# need them are skipped. In CI it fails instead. Starts no service. Safe to run again.
set -euo pipefail

package=${1:-}
say() { printf 'prepare_package: %s\n' "$*" >&2; }
has() { command -v "$1" >/dev/null; }
ready() {
    case $package in
    prometheus) has prometheus && has promtool ;;
    chromium) [ -x "${CHROMIUM:-}" ] || has chromium || has chromium-browser ;;
    # Debian's server has this name too. The package redis-server would put another Redis into PATH.
    redis-tools) has redis-check-rdb ;;
    slurm) has slurmctld && has slurmd && has sbatch && has munged ;;
    *) say "no such package: '$package'; there are prometheus, chromium, redis-tools and slurm" && exit 2 ;;
    esac
}
missing() {
    say "$*: the tests that need $package are skipped"
    [ "${CI:-}" != true ] || exit 1
    exit 0
}

if ready; then exit 0; fi
has apt-get || missing "no $package here, and no Debian packages to install it from"
as_root=(env DEBIAN_FRONTEND=noninteractive)
if [ "$(id -u)" -ne 0 ]; then
    sudo -n true 2>/dev/null || missing "no $package here, and installing it needs root. Run: sudo $0 $package"
    as_root=(sudo "${as_root[@]}")
fi

packages=("$package")
[ "$package" != slurm ] || packages=(slurmctld slurmd slurm-client munge)
say "installing the distribution's ${packages[*]}"
# A package with a service would start it with its own configuration.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee "$policy" >/dev/null
    "${as_root[@]}" chmod +x "$policy"
    trap '"${as_root[@]}" rm -f "$policy"' EXIT
fi
{ "${as_root[@]}" apt-get update -q && "${as_root[@]}" apt-get install -q -y --no-install-recommends "${packages[@]}"; } ||
    missing "apt-get could not install $package"
# Ubuntu's package chromium-browser only points to a snap, and has no package chromium.
ready || missing "the distribution's $package has no program of this name; install one, or name it with CHROMIUM"
