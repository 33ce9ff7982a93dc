#!/usr/bin/env bash
# Starts an installation of its own in a temporary directory, runs the
# end-to-end tests against it, and checks that nothing is left over.
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/bin:$PATH"

dir=$(mktemp -d /var/tmp/opendsec-test.XXXXXX)
finish() {
  code=$?
  if [ $code != 0 ] && [ -f "$dir/state/opendsec.log" ]; then
    echo "--- the end of the server's log"
    tail -50 "$dir/state/opendsec.log"
  fi
  opendsec down --ops "$dir/ops" --remove-all >/dev/null 2>&1 || true
  rm -rf "$dir"
  exit $code
}
trap finish EXIT

port=$((20000 + RANDOM % 10000))
opendsec init --ops "$dir/ops" --state "$dir/state" --listen "127.0.0.1:$port" --programs "$PWD/bin"
opendsec up --ops "$dir/ops" --detach
# shellcheck disable=SC1091
(
  . "$dir/ops/env"
  opendsecctl -q image bootstrap debian root/py:debian
  opendsecctl -q image tag root/py:debian root/py:latest
)
export OPENDSEC_TEST_OPS="$dir/ops"
# shellcheck disable=SC1091
. "$dir/ops/demo.env"
.venv/bin/python -m pytest -q test/e2e "$@"
# shellcheck disable=SC1091
(
  . "$dir/ops/env"
  opendsecctl leaks
)
