#!/bin/bash
# Octavo on two hosts (or more) without a scheduler. The same line on each host, at about the same time:
#
#   HEAD=host1:29500 bash examples/launch/torchrun_two_hosts.sh run.yaml [key=value ...]
#
# HEAD is the host where torchrun's agents meet, and must be one of them. run.dir, the model and the data must lie on a
# file system that all hosts see. A process that dies has all of them started again, RESTARTS times, from the newest
# checkpoint. NODES=1:2 lets the run go on with one host when the other is lost, and with two once it is back; it ends
# where HEAD is lost, and the same line on both hosts continues it.
set -eu
HEAD=${HEAD:?name the host and port where the agents meet, such as HEAD=host1:29500}
NODES=${NODES:-2}
PROCESSES=${PROCESSES:-gpu}
RESTARTS=${RESTARTS:-3}

# After a signal ranks finish their step and save; torchrun would kill them after 30 s. Versions before this variable
# do so all the same: there a checkpoint must fit into 30 s, or the signal go to the ranks themselves.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
# The ranks' store is new with each start, and on the host that has rank 0 then: another host may have been lost.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun \
    --nnodes="$NODES" \
    --nproc-per-node="$PROCESSES" \
    --max-restarts="$RESTARTS" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$HEAD" \
    --rdzv-id="${RUN_ID:-octavo}" \
    -m octavo train "$@" run.resume=auto
