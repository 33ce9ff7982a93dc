#!/usr/bin/env bash
# Fetches the pinned generators and linters: Go tools into bin/tools, Python
# ones into .venv. Running it again costs nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

tools="$PWD/bin/tools"
mkdir -p "$tools"
export GOBIN="$tools" CGO_ENABLED=0 GOFLAGS=-mod=mod

# NAME MODULE@VERSION: installed when bin/tools has no such version yet.
fetch() {
  [ -e "$tools/$1" ] && [ "$(cat "$tools/.$1" 2>/dev/null)" = "$2" ] && return
  (cd /tmp && GOFLAGS='' go install "$2")
  echo "$2" >"$tools/.$1"
}
fetch protoc-gen-go google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.12
fetch protoc-gen-connect-go connectrpc.com/connect/cmd/protoc-gen-connect-go@v1.21.1
fetch staticcheck honnef.co/go/tools/cmd/staticcheck@v0.8.2

want=$(cat sdk/python/requirements-gen.txt sdk/python/pyproject.toml | sha256sum)
if [ "$(cat .venv/.opendsec 2>/dev/null)" != "$want" ]; then
  python3 -m venv .venv || {
    echo "python3 -m venv failed; apt-get install python3-venv" >&2
    exit 1
  }
  .venv/bin/pip install -q --disable-pip-version-check -r sdk/python/requirements-gen.txt -e sdk/python
  echo "$want" >.venv/.opendsec
fi
