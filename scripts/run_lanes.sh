#!/usr/bin/env bash
# Runs make targets in lanes. The lanes run at the same time, the targets of a lane one after the other.
#
#   scripts/run_lanes.sh "images" "dev lint unit" "@dev browser @images e2e"
#
# @TARGET waits until that target of another lane has passed. Prints the output of each target when the target has ended, and last
# the summary of each pytest. The first failure interrupts all other targets.
set -euo pipefail

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
began=$SECONDS
say() { printf '\n==> %s (%d:%02d)\n' "$1" $(((SECONDS - began) / 60)) $(((SECONDS - began) % 60)); }
# Runs a command with its output in a file. Prints the output under a lock, so that two targets do not mix.
stage() {
    local name=$1 code=0
    shift
    say "$name starts"
    "$@" >"$logs/$name" 2>&1 </dev/null || code=$?
    {
        flock 9
        if [ -e "$logs/.failed" ]; then
            say "$name: interrupted"
        else
            say "$name: $([ "$code" = 0 ] && echo passed || echo "failed, exit code $code")"
            cat "$logs/$name"
            [ "$code" = 0 ] || touch "$logs/.failed"
        fi
    } 9>"$logs/.lock"
    return "$code"
}
lane() {
    local target
    trap : INT # This shell outlives the interrupt of its target, to report it.
    for target; do
        if [ "${target#@}" != "$target" ]; then
            while [ ! -e "$logs/.passed-${target#@}" ]; do
                [ ! -e "$logs/.failed" ] || return 1
                sleep 0.2
            done
        else
            stage "$target" "${MAKE:-make}" --no-print-directory "$target"
            touch "$logs/.passed-$target"
        fi
    done
}

# Job control gives each lane its own process group, which is interrupted as Ctrl-C would.
set -m
pids=()
for targets; do
    # shellcheck disable=SC2086
    lane $targets &
    pids+=($!)
done
interrupt() {
    local pid
    for pid in "${pids[@]}"; do kill -INT -- "-$pid" 2>/dev/null || true; done
    for _ in $(seq 120); do
        [ -n "$(jobs -r)" ] || return 0
        sleep 0.5
    done
    for pid in "${pids[@]}"; do kill -KILL -- "-$pid" 2>/dev/null || true; done
}
trap 'touch "$logs/.failed"; interrupt; exit 130' INT TERM
code=0
for _ in "${pids[@]}"; do
    wait -n || { code=$?; interrupt; break; }
done
say "summary"
for targets; do
    for target in $targets; do
        [ -e "$logs/$target" ] || continue
        last=$(grep -E '(passed|failed|errors?|skipped).* in [0-9.]+s' "$logs/$target" | tail -n 1) || true
        [ -z "$last" ] || echo "$target: $last"
    done
done
exit "$code"
