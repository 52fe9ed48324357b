# The rest is the same in every job: gristmill_cli/slurm/job.sh. Slurm runs it on the first node of the trainer.
set -euo pipefail

mapfile -t TRAINER_NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0")
mapfile -t MODEL_NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1")
ALL_NODES=("${TRAINER_NODES[@]}" "${MODEL_NODES[@]}")
FIRST_NODE=${TRAINER_NODES[0]}
ALL_NAMES=$(IFS=,; echo "${ALL_NODES[*]}")
MODEL_URLS=$(for node in "${MODEL_NODES[@]}"; do
  for ((i = 0; i < SERVERS_PER_NODE; i++)); do echo "http://$node:$((FIRST_MODEL_PORT + i))"; done
done | paste --serial --delimiters=,)

# On the first node, for this start of the job: Redis' settings and socket, and a mark that exists until the job stops.
LOCAL=$(mktemp --directory /tmp/gristmill-"$SLURM_JOB_ID"-XXXXXX)
touch "$LOCAL/running"
echo "$REDIS_CONF" > "$LOCAL/redis.conf"
trap 'rm -rf "$LOCAL"' EXIT
LOGS=$GRISTMILL_RUNS_DIR/$RUN/logs
mkdir --parents "$LOGS" "$STATE/redis" "$STATE/tokens" "$GRISTMILL_MODELS_DIR" "$GRISTMILL_WEIGHTS_DIR"

# Other users of the cluster reach the API's port, so the API asks for tokens. The first job writes the tokens.
chmod 700 "$STATE" "$STATE/tokens"
for role in env trainer admin; do
  [ -s "$STATE/tokens/$role" ] || (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$STATE/tokens/$role")
done

export PYTHONUNBUFFERED=1
export GRISTMILL_API_URL=http://$FIRST_NODE:$API_PORT GRISTMILL_MODEL_URL=$MODEL_URLS
export API_AUTH=token API_TOKENS_DIR=$STATE/tokens API_ALLOWED_HOSTS=$ALL_NAMES API_VIEW_SERVERS=$MODEL_URLS
export REDIS_URL=unix://$LOCAL/redis.sock
export MODEL_HOST=0.0.0.0
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$((GRACE - 60))

say() { echo "$(date '+%F %T') $*"; }

# run_step NAME GROUP NODES SERVICE COMMAND...: runs a step of the job, one task per node, with all resources of its
# nodes. GROUP is 0 for the trainer's nodes and 1 for the model servers' nodes.
run_step() {
  local name=$1 group=$2 nodes=$3 count image=${IMAGE//\{service\}/$4} mounts=$MOUNTS pyxis=() apptainer=()
  case $4 in redis | api) mounts+=,$LOCAL:$LOCAL ;; esac # Other nodes do not have this folder.
  shift 4
  count=$(awk -F, '{ print NF }' <<< "$nodes")
  case $CONTAINERS in
    pyxis) pyxis=(--container-image="$image" --container-mounts="$mounts") ;;
    apptainer) apptainer=(apptainer exec --nv --bind "$mounts" "$image") ;;
  esac
  srun --job-name="$name" --het-group="$group" --nodelist="$nodes" --nodes="$count" --ntasks="$count" \
    --ntasks-per-node=1 --export=ALL --overlap --mem=0 --cpu-bind=none --kill-on-bad-exit=1 "${pyxis[@]}" \
    "${apptainer[@]}" "$@" >> "$LOGS/$name.log" 2>&1
}

# keep WHEN NAME ...: runs a step, and runs it again when it ends (WHEN=always) or when it fails (WHEN=on-failure).
# After ten failures in a row, each less than ten minutes after its start, the job fails.
keep() {
  local when=$1 name=$2 code started failures=0
  shift
  while true; do
    started=$SECONDS code=0
    run_step "$@" || code=$?
    [ -e "$LOCAL/running" ] || return 0
    [ "$when" = always ] || [ "$code" -ne 0 ] || return 0
    ((SECONDS - started < 600)) && failures=$((failures + 1)) || failures=0
    if ((failures == 10)); then
      say "$name failed ten times in a row, the last time with exit code $code; its log is $LOGS/$name.log"
      kill -USR1 $$
      return 1
    fi
    say "$name ended with exit code $code; it starts again"
    sleep 2
  done
}

# Before the time limit, and on `scancel --batch --signal=TERM JOB`: the trainer writes a checkpoint, and the job
# returns to the queue. After `scancel JOB` the trainer writes a checkpoint too, and the job ends.
stop() {
  local step states
  trap '' TERM
  rm -f "$LOCAL/running"
  states=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)
  say "stopping; the trainer writes a checkpoint"
  step=$(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format='%i %j' | awk '$2 == "trainer" { print $1 }')
  if [ -n "$step" ]; then
    # In a heterogeneous job, scancel signals the step, and then fails because the other component has no such step.
    scancel --quiet --signal=TERM "$step" || true
  fi
  [ -z "${TRAINER:-}" ] || wait "$TRAINER" || true
  # At the time limit the components are RUNNING, or for a moment SIGNALING.
  if grep --quiet --extended-regexp 'CANCELLED|COMPLETING' <<< "$states"; then
    say "the job was cancelled: its components are ${states//$'\n'/ and }"
    exit 143
  fi
  say "the job returns to the queue"
  scontrol requeue "$SLURM_JOB_ID" || sbatch --dependency="afterany:$SLURM_JOB_ID" "$STATE/job.sh"
  exit 0
}
trap stop TERM
trap 'exit 1' USR1

say "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)): API $GRISTMILL_API_URL, model servers $MODEL_URLS"
# Redis has no port: only this user, on this node, can connect. The lock keeps out a job that still runs on a lost node.
keep always redis 0 "$FIRST_NODE" redis flock "$STATE/redis.lock" "$REDIS" "$LOCAL/redis.conf" --port 0 \
  --unixsocket "$LOCAL/redis.sock" --dir "$STATE/redis" &
keep always api 0 "$FIRST_NODE" api "$PYTHON" -m gristmill_api --host 0.0.0.0 --port "$API_PORT" &

number=0
for node in "${MODEL_NODES[@]}"; do
  for ((i = 0; i < SERVERS_PER_NODE; i++)); do
    gpus=()
    ((GPUS_PER_SERVER == 0)) || gpus=(
      CUDA_VISIBLE_DEVICES="$(seq --separator=, $((i * GPUS_PER_SERVER)) $(((i + 1) * GPUS_PER_SERVER - 1)))"
      MODEL_TENSOR_PARALLEL="$GPUS_PER_SERVER" GPU_MEMORY_UTILIZATION="${GPU_MEMORY_UTILIZATION:-0.85}"
    )
    keep always "model-$number" 1 "$node" model env MODEL_PORT=$((FIRST_MODEL_PORT + i)) "${gpus[@]}" \
      "$MODEL_PYTHON" -m gristmill_model &
    number=$((number + 1))
  done
done

# A first start may download the model. Trainer and environments read its manifest.
until (exec 3<> "/dev/tcp/${MODEL_NODES[0]}/$FIRST_MODEL_PORT") 2> "$LOCAL/connect"; do
  sleep 2 &
  wait $!
done

# shellcheck disable=SC2016  # Slurm sets SLURM_NODEID in each task.
GRISTMILL_API_TOKEN_FILE=$STATE/tokens/trainer keep on-failure trainer 0 "$(IFS=,; echo "${TRAINER_NODES[*]}")" trainer \
  bash -c 'exec "$@" --node-rank "$SLURM_NODEID" -m gristmill_trainer' torchrun \
  "$PYTHON" -m torch.distributed.run --nnodes "${#TRAINER_NODES[@]}" --nproc-per-node "$RANKS_PER_NODE" \
  --master-addr "$FIRST_NODE" --master-port $((20000 + SLURM_JOB_ID % 10000)) &
TRAINER=$!

ENVIRONMENTS=()
# One environment per node, from the last node on, until all are placed. --slurm reads the three variables.
for ((i = 0; i < ENV_WORKERS; i++)); do
  at=$(((${#ALL_NODES[@]} * ENV_WORKERS - 1 - i) % ${#ALL_NODES[@]}))
  GRISTMILL_API_TOKEN_FILE=$STATE/tokens/env keep on-failure "env-$i" $((at >= ${#TRAINER_NODES[@]})) \
    "${ALL_NODES[at]}" env env SLURM_JOB_NODELIST="$ALL_NAMES" NUM_TRAINING_NODES="${#TRAINER_NODES[@]}" \
    INFER_TP=$((8 / SERVERS_PER_NODE)) "$PYTHON" -m gristmill_env serve --config "$CONFIG" "${SETTINGS[@]}" --slurm &
  ENVIRONMENTS+=($!)
done

wait "${ENVIRONMENTS[@]}" # Environments end with the run. The trainer may still upload the model to a hub.
while kill -0 "$TRAINER" 2> "$LOCAL/trainer"; do
  # A trainer that fails after the run's end starts again, and finds no run.
  if tail --lines=1 "$LOGS/trainer.log" | grep --quiet 'waiting for a run'; then break; fi
  sleep 1 &
  wait $!
done
for ((i = 0; i < 30; i++)); do # The API archives the last groups, and writes the report. An extended run has an old one.
  [ ! "$GRISTMILL_RUNS_DIR/$RUN/report.html" -nt "$LOCAL/running" ] || break
  sleep 1
done
rm -f "$LOCAL/running"
say "run $RUN is finished; its folder is $GRISTMILL_RUNS_DIR/$RUN"
