#!/usr/bin/env bash
# What `./build.sh demo` runs once everything is built: the demo model, a server on a unix socket of its own, two streamed
# answers. Needs .venv/bin first on PATH. Ends with the server stopped, and non-zero if anything failed.
set -euo pipefail

work=$(mktemp -d)
server=
cleanup() {
  if [ -n "$server" ] && kill -0 "$server" 2> /dev/null; then
    kill "$server"
    wait "$server" || true
  fi
  rm -rf "$work"
}
trap cleanup EXIT

say() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
endpoint=unix:$work/xllm.sock

say "xllm pull smollm2-135m"
model=$(xllm pull smollm2-135m | tail -n 1)
echo "$model"

say "xllm serve $(basename "$model") --listen $endpoint"
xllm serve "$model" --listen "$endpoint" > "$work/serve.log" 2>&1 &
server=$!

# Until the health service says SERVING: half a minute at most, and not after the server has died.
python - "$endpoint" "$server" << 'EOF' || { cat "$work/serve.log" >&2; exit 1; }
import os
import sys
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

endpoint, server = sys.argv[1], int(sys.argv[2])
started = time.monotonic()
request = health_pb2.HealthCheckRequest()
while True:
    try:
        with grpc.insecure_channel(endpoint) as channel:
            reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=1)
            if reply.status == health_pb2.HealthCheckResponse.SERVING:
                break
    except grpc.RpcError:
        pass
    if time.monotonic() - started > 30:
        sys.exit("demo: the server was not SERVING within 30 s")
    try:
        os.kill(server, 0)
    except ProcessLookupError:
        sys.exit("demo: the server has stopped")
    time.sleep(0.02)
print(f"SERVING after {time.monotonic() - started:.2f} s")
EOF

say 'xllm generate "The capital of France is"'
xllm generate "The capital of France is" --endpoint "$endpoint" --max-tokens 48 --temperature 0

question="Give me three tips for a good night's sleep."
say "xllm generate --chat \"$question\""
xllm generate "$question" --chat --endpoint "$endpoint" --max-tokens 80 --temperature 0

say "stopping the server"
kill "$server"
wait "$server" || { status=$?; cat "$work/serve.log" >&2; echo "demo: the server ended with $status" >&2; exit 1; }
server=
