# Two nodes with a network, a home and a TMPDIR of their own, and a bucket on a third address, inside `unshare -Urnm`.
# bash two_nodes.sh OUT MODEL FLAG...: trains runs.jsonl of OUT to s3://runs/whole, and with one rank killed to
# s3://runs/killed, and writes OUT/found.json.
set -euo pipefail
out=$1 model=$2
shift 2
mount -t tmpfs none /run
mkdir -p /run/netns
ip link set lo up
ip link add bridge0 type bridge
ip addr add 10.77.0.1/24 dev bridge0
ip link set bridge0 up
number=2
for node in a b; do
    ip netns add $node
    ip link add veth-$node type veth peer name eth0 netns $node
    ip link set veth-$node master bridge0
    ip link set veth-$node up
    ip -n $node link set lo up
    ip -n $node addr add 10.77.0.$number/24 dev eth0
    ip -n $node link set eth0 up
    number=$((number + 1))
done
export AWS_ENDPOINT_URL=http://10.77.0.1:5555
"$PYTHON" "$(dirname "$0")/two_nodes.py" bucket > "$out/bucket.log" 2>&1 &
bucket=$!
trap 'kill $bucket' EXIT
"$PYTHON" "$(dirname "$0")/two_nodes.py" ready

# node NAME RANK RUN FLAG...: one node's torchrun, in its namespace, with a home and a TMPDIR of its own.
node() {
    local name=$1 rank=$2 run=$3
    shift 3
    mkdir -p "$out/$name"
    ip netns exec "$name" bash -c '
        export HOME='"$out/$name"' TMPDIR='"$out/$name"' GLOO_SOCKET_IFNAME=eth0
        exec "$@"' - \
        "$PYTHON" -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --node-rank "$rank" --max-restarts 2 \
        --master-addr 10.77.0.2 --master-port 29500 --monitor-interval 0.5 \
        "$(dirname "$0")/two_nodes.py" train "$out" "$run" "$out/runs.jsonl" --model "$model" --out "s3://runs/$run" "$@" \
        > "$out/$name-$run.log" 2>&1
}

for run in whole killed; do
    node a 0 $run "$@" &
    first=$!
    node b 1 $run "$@" || { cat "$out"/?-$run.log; exit 1; }
    wait $first || { cat "$out"/?-$run.log; exit 1; }
done
"$PYTHON" "$(dirname "$0")/two_nodes.py" found "$out"
