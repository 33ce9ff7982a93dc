#!/usr/bin/env bash
# Measures OpenDsec against the raw tools in one run: builds stock runsc from
# the pinned module, starts an installation of its own in a temporary
# directory, prints a table and writes bench.json. Arguments go to bench.py.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/bin:$PATH"
export CGO_ENABLED=0 # a dynamically linked sentry dies in its chroot

deploy/tools.sh
mkdir -p build
go build -trimpath -o build/runsc gvisor.dev/gvisor/runsc

dir=$(mktemp -d /var/tmp/opendsec-bench.XXXXXX)
finish() {
  code=$?
  opendsec down --ops "$dir/ops" --remove-all >/dev/null 2>&1 || true
  rm -rf "$dir"
  exit $code
}
trap finish EXIT

port=$((20000 + RANDOM % 10000))
opendsec init --ops "$dir/ops" --state "$dir/state" --listen "127.0.0.1:$port" --programs "$PWD/bin"
# What bounds a sandbox's network by default is not what is measured.
python3 - "$dir/ops/edge.json" <<'EOF'
import json, sys
config = json.load(open(sys.argv[1]))
config["network"] = config.get("network", {}) | {"bandwidth_mbit": 1e6, "packets_per_second": 10_000_000}
json.dump(config, open(sys.argv[1], "w"), indent=2)
EOF
opendsec up --ops "$dir/ops" --detach
# shellcheck disable=SC1091
. "$dir/ops/env"
opendsecctl -q image bootstrap debian root/py:debian
opendsecctl -q image tag root/py:debian root/py:latest
# shellcheck disable=SC1091
. "$dir/ops/demo.env"
.venv/bin/python test/bench/bench.py --runsc "$PWD/build/runsc" --state "$dir/state" --out bench.json "$@"

# What rules cost a packet, a name and a connection, in network namespaces of their own.
case " $* " in
  *" --part "*) [[ " $* " == *" --part all "* || " $* " == *" --part network "* ]] || exit 0 ;;
esac
echo
go test ./internal/netgate -run '^$' -bench . -benchtime 2s | grep ^Benchmark
