#!/usr/bin/env bash
# Generates code: Go and Python from api/*.proto, the sync SDK from the async
# one. With --check it generates nothing and fails when something is stale.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/bin/tools:$PWD/.venv/bin:$PATH"

generate() { # into the tree at $1
  (cd "$1/api" && buf lint && rm -rf gen && buf generate &&
    rm -rf ../sdk/python/src/opendsec/_gen && buf generate --template ../sdk/python/buf.gen.yaml)
  (cd "$1/sdk/python" && python tools/generate_sync.py)
}

if [ "${1:-}" != --check ]; then
  generate "$PWD"
  exit
fi
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -a api sdk "$copy/"
generate "$copy"
for part in api/gen sdk/python/src/opendsec; do
  if ! diff -r -x __pycache__ "$part" "$copy/$part"; then
    echo "$part is stale; run: make gen" >&2
    exit 1
  fi
done
echo "generated code is fresh"
