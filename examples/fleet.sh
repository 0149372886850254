#!/usr/bin/env bash
# Starts a fleet of two engines on a free port, asks it, kills one engine during an answer, and shows that the answer
# goes on: bash examples/fleet.sh
set -euo pipefail
log=$(mktemp)
penstock fleet serve smollm2 --name example-$$ --replicas 2 --max-len 2048 --port 0 > "$log" 2>&1 &
gateway=$!
trap 'kill $gateway; wait $gateway || true; rm "$log"' EXIT
until url=$(grep --only-matching --max-count 1 'http://127.0.0.1:[0-9]*' "$log"); do
  kill -0 $gateway || { cat "$log"; exit 1; }
  sleep 0.2
done
penstock fleet status --fleet example-$$

question='{"prompt": "Once upon a time", "max_tokens": 300, "seed": 1, "ignore_eos": true}'
answer() { curl --silent --show-error --fail-with-body "$url/v1/completions" -H 'content-type: application/json' -d "$question"; }
text='import json, sys; print(json.load(sys.stdin)["choices"][0]["text"])'
answer | python -c "$text" > "$log.1"

answer | python -c "$text" > "$log.2" &
asked=$!
sleep 0.5
victim=$(penstock fleet status --fleet example-$$ --json |
  python -c 'import json, sys; print(max(json.load(sys.stdin)["replicas"], key=lambda each: each["in_flight"])["pid"])')
kill -9 "$victim"
wait $asked
cmp "$log.1" "$log.2" && echo "engine $victim was killed, and the answer is the same"
rm "$log.1" "$log.2"
