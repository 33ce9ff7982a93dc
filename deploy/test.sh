#!/usr/bin/env bash
# Installs what the tests need, then runs all of them against the real things:
# gVisor, runc, SQLite, PostgreSQL, the real agent. Wants root.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '==> %s\n' "$*"; }

[ "$(id -u)" = 0 ] || {
  echo "the tests make real machines, so they want root" >&2
  exit 1
}

say "installing what the tests need"
missing=()
while read -r program package; do
  command -v "$program" >/dev/null || [ -x "$program" ] || missing+=("$package")
done <<EOF
runc runc
mkfs.erofs erofs-utils
mmdebstrap mmdebstrap
ip iproute2
nft nftables
mkfs.ext4 e2fsprogs
mkfs.xfs xfsprogs
busybox busybox-static
skopeo skopeo
umoci umoci
make make
git git
curl curl
cc gcc
EOF
[ -e /usr/include/stdio.h ] || missing+=(libc6-dev)
ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || missing+=(postgresql)
python3 -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3-venv)
if [ ${#missing[@]} -gt 0 ]; then
  apt-get update -qq
  # A database server of the distribution's would be started for nothing.
  mkdir -p /etc/postgresql-common
  [ -e /etc/postgresql-common/createcluster.conf ] || echo 'create_main_cluster = false' >/etc/postgresql-common/createcluster.conf
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

say "building"
make -s build tools

say "checking style and generated code"
make -s lint
make -s gen-check

say "testing the packages"
go test -timeout 15m ./...

say "testing the Python SDK"
.venv/bin/python -m pytest -q sdk/python/tests

say "testing a whole installation"
test/run.sh
