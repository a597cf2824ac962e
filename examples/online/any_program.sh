#!/bin/sh
# Any program in any language, recorded: a session by its path, its reward by one POST.
#
#     tracegrad proxy --server http://127.0.0.1:8000 --out out/proxy --port 8800 &
#     sh examples/online/any_program.sh http://127.0.0.1:8800 out/proxy/key
#
# Then `tracegrad doctor` and `tracegrad train` take out/proxy/played/00000.jsonl.zst.
set -eu
url=$1 key=$(cat "$2")

post() {
    curl -sS --fail-with-body -H "Authorization: Bearer $key" -H "Content-Type: application/json" "$url$1" -d "$2"
}

# What the server calls its model.
model=$(curl -sS --fail-with-body -H "Authorization: Bearer $key" "$url/v1/models" |
    grep -o '"id": *"[^"]*"' | head -n 1 | cut -d '"' -f 4)
question=$(
    cat << END
{"model": "$model", "max_tokens": 64, "messages": [
    {"role": "system", "content": "You are the clerk of a shop. Look up prices and stock, then answer the customer by name."},
    {"role": "user", "content": "Ben: at the offer of 21 €, what is the total for 4 × red lamp?"}]}
END
)

for sample in 1 2 3 4; do
    session=lamp-$sample
    answer=$(post /s/$session/v1/chat/completions "$question")
    case $answer in *"84 €"*) reward=1 ;; *) reward=0 ;; esac
    post /s/$session/reward "{\"reward\": $reward, \"group\": \"lamp\"}"
    echo " $session: $reward"
done
