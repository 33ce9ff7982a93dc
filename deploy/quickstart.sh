#!/usr/bin/env bash
# Installs OpenDsec on this machine and ends with a sandbox of each kind that
# works here having run Python. Running it again updates what is there and
# loses nothing. With --uninstall it removes all that it made.
set -euo pipefail
shopt -s inherit_errexit

root=$(cd "$(dirname "$0")/.." && pwd)
ops=/root/opendsec-ops
lib=/usr/local/lib/opendsec
state=
listen=
dns=()
source=docker.io/library/python:3.12
xfs_size=
action=install

say() { printf '==> %s\n' "$*"; }
note() { printf '    %s\n' "$*"; }
die() {
  printf 'quickstart: %s\n' "$*" >&2
  exit 1
}

usage() {
  cat <<EOF
usage: deploy/quickstart.sh [options]

  --listen ADDR:PORT  where the API listens (default 127.0.0.1:7300)
  --state DIR         where sandboxes and images are kept (default /data/opendsec
                      where something is mounted at /data, else /var/lib/opendsec)
  --ops DIR           where the configuration, the CA's key and the tokens are
                      kept (default $ops)
  --dns ADDR[:PORT]   the resolver that sandboxes' names are asked of; may be
                      repeated (default those of /etc/resolv.conf)
  --image SOURCE      the image to import first (default $source)
  --xfs-image SIZE    keep the state in an XFS file system inside a file of this
                      size beside its directory, such as 100G (from 1G; M, G and
                      T are powers of 1024). It makes copies of state cheap where
                      the machine's own file system has no reflink
  --uninstall         stop everything and remove all that this script made
EOF
}

while [ $# -gt 0 ]; do
  case "$1" in
    --listen | --state | --ops | --dns | --image | --xfs-image)
      [ -n "${2:-}" ] || die "$1 wants a value; see --help"
      case "$1" in
        --listen) listen=$2 ;;
        --state) state=$2 ;;
        --ops) ops=$2 ;;
        --dns) dns+=(--dns "$2") ;;
        --image) source=$2 ;;
        --xfs-image) xfs_size=$2 ;;
      esac
      shift
      ;;
    --uninstall) action=uninstall ;;
    -h | --help)
      usage
      exit 0
      ;;
    *)
      usage >&2
      exit 2
      ;;
  esac
  shift
done

[ "$(id -u)" = 0 ] || die "run this as root (sudo -i first): making machines needs it"
[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || die "this is $(uname -s) on $(uname -m); OpenDsec runs on Linux x86_64"

has_systemd() { [ -d /run/systemd/system ]; }
units=(opendsec-iam@0.service opendsec-edge.service opendsec-watcher@0.service opendsec-apiserver@0.service)

# The state may be in an XFS file system in a file beside its directory. That it
# is, and where, is noted before the file is made.
xfs_note=$ops/xfs-image
xfs_file=
if [ -f "$xfs_note" ]; then xfs_file=$(cat "$xfs_note"); fi
xfs_options=loop,X-fstrim.notrim # a trim would give the file's room away

# The state's place is fixed by the first run.
if [ -n "$xfs_file" ]; then
  [ "${state:-${xfs_file%.xfs}}" = "${xfs_file%.xfs}" ] || die "this installation has its state at ${xfs_file%.xfs}; leave --state out"
  state=${xfs_file%.xfs}
elif [ -z "$state" ] && [ -f "$ops/state" ]; then
  state=$(cat "$ops/state")
fi
if [ -z "$state" ]; then
  state=/var/lib/opendsec
  if mountpoint -q /data; then state=/data/opendsec; fi
fi

# bytes prints a size such as 100G as a number.
bytes() {
  [[ $1 =~ ^([1-9][0-9]{0,5})([MGT])$ ]] || return 1
  case ${BASH_REMATCH[2]} in
    M) echo $((BASH_REMATCH[1] << 20)) ;;
    G) echo $((BASH_REMATCH[1] << 30)) ;;
    T) echo $((BASH_REMATCH[1] << 40)) ;;
  esac
}

human() { numfmt --to=iec --format=%.1f "$1"; }

# xfs_check refuses, before anything is changed, an XFS file that cannot be made.
xfs_check() {
  [ -n "$xfs_size" ] || return 0
  local wanted free where
  wanted=$(bytes "$xfs_size") || die "--xfs-image $xfs_size is not a size; give a whole number with M, G or T, such as 100G"
  [ "$wanted" -ge $((1 << 30)) ] || die "--xfs-image $xfs_size is too small; it wants at least 1G"
  if [ -n "$xfs_file" ] && [ -f "$xfs_file" ]; then return 0; fi
  if mountpoint -q "$state"; then die "something is mounted at $state already, so --xfs-image is not for it; leave it out, or give another --state"; fi
  if [ -d "$state" ] && [ -n "$(ls -A "$state")" ]; then
    die "$state holds something already, which --xfs-image would hide; move it away, or uninstall first with deploy/quickstart.sh --uninstall"
  fi
  [ -n "$xfs_file" ] || [ ! -e "$state.xfs" ] || die "$state.xfs is there already and not of this installation; move it away"
  where=$(dirname "$state")
  while [ ! -d "$where" ]; do where=$(dirname "$where"); done
  free=$(($(stat -f -c '%a * %S' "$where")))
  [ -z "$xfs_file" ] || [ ! -e "$xfs_file.new" ] || free=$((free + $(stat -c '%b * %B' "$xfs_file.new")))
  # The programs, and the rest of the machine, want some room too.
  [ $((wanted + (1 << 30))) -le "$free" ] || die "no room for --xfs-image $xfs_size: the file system of $where has $(human "$free") free, of which 1G stays so; give a smaller size"
}

# xfs_make makes the file that --xfs-image asks for, once.
xfs_make() {
  [ -n "$xfs_size" ] || return 0
  if [ -n "$xfs_file" ] && [ -f "$xfs_file" ]; then
    note "the state's XFS file $xfs_file of $(human "$(stat -c %s "$xfs_file")") is there; it stays as it is"
    return
  fi
  xfs_file=$state.xfs
  say "making an XFS file system of $xfs_size in $xfs_file, for $state"
  mkdir -p "$(dirname "$state")"
  mkdir -p "$ops"
  chmod 0700 "$ops"
  echo "$xfs_file" >"$xfs_note"
  rm -f "$xfs_file.new"
  if ! (umask 077 && fallocate -l "$(bytes "$xfs_size")" "$xfs_file.new"); then
    rm -f "$xfs_file.new" "$xfs_note"
    die "a file of $xfs_size could not be allocated at $xfs_file; see the message above"
  fi
  mkfs.xfs -q -K -m reflink=1 -L opendsec "$xfs_file.new"
  sync "$xfs_file.new"
  mv "$xfs_file.new" "$xfs_file"
}

# xfs_mount sees to it that the state's XFS file, if it has one, is mounted, now
# and after a reboot.
xfs_mount() {
  [ -n "$xfs_file" ] || return 0
  [ -f "$xfs_file" ] || die "the state's XFS file $xfs_file is not there; bring it back, or make a new one with --xfs-image SIZE"
  mkdir -p "$state"
  if ! mountpoint -q "$state"; then
    mount -t xfs -o "$xfs_options" "$xfs_file" "$state" || die "$xfs_file could not be mounted at $state; see the message above"
    note "mounted $xfs_file at $state"
  fi
  if ! has_systemd; then
    note "after a reboot, before anything else: mount -o $xfs_options $xfs_file $state"
    return
  fi
  grep -qF "$xfs_file $state " /etc/fstab || echo "$xfs_file $state xfs $xfs_options,nofail 0 0" >>/etc/fstab
  local unit
  for unit in opendsec-iam@ opendsec-edge opendsec-watcher@ opendsec-apiserver@; do
    mkdir -p "/etc/systemd/system/$unit.service.d"
    printf '[Unit]\nRequiresMountsFor=%s\n' "$state" >"/etc/systemd/system/$unit.service.d/state.conf"
  done
}

# xfs_remove takes the state's XFS file away with all that is in it.
xfs_remove() {
  [ -n "$xfs_file" ] || return 0
  if mountpoint -q "$state"; then
    umount "$state" || die "$state is in use, so $xfs_file stays; end what uses it and run this again"
  fi
  if grep -qsF "$xfs_file $state " /etc/fstab; then
    local left
    left=$(grep -vF "$xfs_file $state " /etc/fstab || true)
    printf '%s\n' "$left" >/etc/fstab
  fi
  rm -f "$xfs_file" "$xfs_file.new" "$xfs_note"
  note "unmounted and removed $xfs_file"
}

uninstall() {
  if [ -f "$xfs_file" ] && ! mountpoint -q "$state"; then xfs_mount; fi
  say "stopping"
  if has_systemd; then
    systemctl disable --now "${units[@]}" 2>/dev/null || true
  fi
  if [ -x "$lib/opendsec" ] && [ -d "$ops" ]; then
    "$lib/opendsec" down --ops "$ops" --remove-all
  fi
  say "removing"
  rm -rf /etc/systemd/system/opendsec-*.service /etc/systemd/system/opendsec-*.service.d
  rm -f /usr/local/bin/opendsec /usr/local/bin/opendsecctl
  xfs_remove
  if has_systemd; then systemctl daemon-reload; fi
  # What is mounted at the state's place stays; only what is in it goes.
  if mountpoint -q "$state"; then
    find "$state" -mindepth 1 -delete
  else
    rm -rf "$state"
  fi
  rm -rf "$lib" "$ops" "${root:?}/bin" "$root/build"
  note "gone: the services, $state, $ops, $lib"
  if [ -s /var/lib/opendsec-packages ]; then
    note "packages that the installation added stay; to remove them:"
    note "apt-get remove $(tr '\n' ' ' </var/lib/opendsec-packages)"
    rm -f /var/lib/opendsec-packages
  fi
}

# packages installs what is missing and notes what that was.
packages() {
  local missing=()
  local pair
  for pair in runc:runc mkfs.erofs:erofs-utils mmdebstrap:mmdebstrap ip:iproute2 nft:nftables curl:curl make:make git:git \
    mkfs.ext4:e2fsprogs losetup:mount ${xfs_size:+mkfs.xfs:xfsprogs}; do
    command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
  done
  [ -e /etc/ssl/certs/ca-certificates.crt ] || missing+=(ca-certificates)
  [ ${#missing[@]} -gt 0 ] || return 0
  command -v apt-get >/dev/null || die "missing: ${missing[*]}; this machine has no apt-get, so install them yourself and run this again"
  note "installing ${missing[*]}"
  local log
  log=$(mktemp)
  if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    tail -20 "$log" >&2
    rm -f "$log"
    die "apt-get could not install ${missing[*]}"
  fi
  rm -f "$log"
  printf '%s\n' "${missing[@]}" >>/var/lib/opendsec-packages
}

# new_enough tells whether the go at $1 can build this project.
new_enough() {
  local have want
  want=$(awk '$1 == "go" {print $2}' "$root/go.mod")
  have=$("$1" env GOVERSION 2>/dev/null) || return 1
  [ "$(printf '%s\n%s\n' "go$want" "$have" | sort -V | head -1)" = "go$want" ]
}

# find_go sets $go: the machine's own if it is new enough, else one fetched
# into build/ from go.dev, or from the module proxy where go.dev is out of reach.
find_go() {
  local candidate
  for candidate in "$(command -v go || true)" /usr/local/go/bin/go "$root/build/go/bin/go"; do
    if [ -n "$candidate" ] && [ -x "$candidate" ] && new_enough "$candidate"; then
      go=$candidate
      return
    fi
  done
  local version proxy
  version=$(awk '$1 == "go" {print $2}' "$root/go.mod")
  proxy=${GOPROXY:-https://proxy.golang.org}
  proxy=${proxy%%[,|]*}
  note "no Go $version or newer here; getting one"
  mkdir -p "$root/build"
  rm -rf "$root/build/go"
  if curl -fsSL --connect-timeout 10 "https://go.dev/dl/go$version.linux-amd64.tar.gz" -o "$root/build/go.tar.gz" 2>/dev/null; then
    tar -C "$root/build" -xzf "$root/build/go.tar.gz"
  elif curl -fsSL --connect-timeout 10 "$proxy/golang.org/toolchain/@v/v0.0.1-go$version.linux-amd64.zip" -o "$root/build/go.zip"; then
    command -v unzip >/dev/null || apt-get install -y -qq unzip >/dev/null
    unzip -q "$root/build/go.zip" -d "$root/build"
    mv "$root/build/golang.org/toolchain@v0.0.1-go$version.linux-amd64" "$root/build/go"
    chmod -R +x "$root/build/go/bin" "$root/build/go/pkg/tool"
    rm -rf "$root/build/golang.org"
  else
    die "neither go.dev nor the module proxy ($proxy) gave a Go $version; install it to /usr/local/go and run this again"
  fi
  rm -f "$root/build/go.tar.gz" "$root/build/go.zip"
  go=$root/build/go/bin/go
}

ctl() { # as the caller whose env file is $1
  local env=$1
  shift
  # shellcheck disable=SC1090
  (. "$env" && "$lib/opendsecctl" "$@")
}

start() {
  if has_systemd; then
    install -m 0644 "$root"/deploy/units/*.service /etc/systemd/system/
    sed -i "s|@LIB@|$lib|; s|@OPS@|$ops|" /etc/systemd/system/opendsec-*.service
    systemctl daemon-reload
    systemctl enable -q "${units[@]}"
    systemctl restart "${units[@]}"
    "$lib/opendsec" wait --ops "$ops" || die "the services did not come up; see: journalctl -u 'opendsec-*'"
  else
    "$lib/opendsec" down --ops "$ops" 2>/dev/null || true
    "$lib/opendsec" up --ops "$ops" --detach || die "it did not come up; see $state/opendsec.log"
    note "no systemd here, so 'opendsec up' runs in the background; its log is $state/opendsec.log"
    note "after a reboot start it again with: opendsec up --ops $ops --detach"
  fi
}

# image brings root/py into the cluster: from a registry, or else built from
# the machine's own package mirror.
image() {
  if ctl "$ops/env" -q image show root/py:latest >/dev/null 2>&1; then
    note "root/py:latest is there"
    return
  fi
  local tag=${source##*:}
  say "importing $source as root/py:$tag"
  if ctl "$ops/env" -q image import "$source" "root/py:$tag" >/dev/null; then
    ctl "$ops/env" -q image tag "root/py:$tag" root/py:latest >/dev/null
    return
  fi
  say "no image from there; building a Debian image with Python, pip, curl and git as root/py:debian"
  ctl "$ops/env" -q image bootstrap debian root/py:debian >/dev/null || die "the image could not be built; see the message above"
  ctl "$ops/env" -q image tag root/py:debian root/py:latest >/dev/null
}

try() { # runs Python in a sandbox of the kind $1
  local out
  if out=$(ctl "$ops/demo.env" sandbox run --rm --backend "$1" root/py:latest -- python3 -c 'print(6 * 7)' 2>&1) && [ "$out" = 42 ]; then
    printf '  [ok] %s sandbox ran python\n' "$1"
    return
  fi
  printf '  [no] %s sandbox: %s\n' "$1" "$out"
  failed=1
}

install_all() {
  xfs_check
  say "checking this machine"
  packages
  find_go
  say "building"
  (cd "$root" && PATH="$(dirname "$go"):$PATH" make -s build)
  xfs_make
  xfs_mount
  say "writing the cluster config to $ops"
  "$root/bin/opendsec" doctor --state "$state" | sed '/^\[--\] reflink:/s/$/, or install with --xfs-image SIZE/' || die "this machine lacks what is marked [no] and needed above"
  say "installing (programs, certificates, node settings)"
  make -s -C "$root" install PREFIX=/usr/local
  say "creating the project root/demo and its caller"
  "$lib/opendsec" init --ops "$ops" --state "$state" ${listen:+--listen "$listen"} "${dns[@]}" --programs "$lib"
  say "starting"
  start
  say "checking the image store"
  image
  say "running a sandbox"
  local failed=0 backend
  for backend in $(ctl "$ops/env" -o json status | awk -F'"' '/"name":/ {name = $4} /"available": *true/ {print name}'); do
    case $backend in
      sim) ;;
      *) try "$backend" ;;
    esac
  done
  ctl "$ops/env" status | sed -n 's/^ *no \(.*\)/  [--] no \1/p'
  "$lib/opendsec" doctor --state "$state" --only kvm | sed -n 's/^\[--\] kvm: /  [--] no microvm: /p'
  [ $failed = 0 ] || die "not every kind of sandbox works; the log is $state/opendsec.log, or journalctl -u 'opendsec-*'"
  cat <<EOF

OpenDsec is running on this machine.

  as the admin:   . $ops/env && opendsecctl status
  as a caller:    . $ops/demo.env && opendsecctl sandbox run --rm root/py:latest -- python3 -V
  from Python:    python3 -m venv .venv && .venv/bin/pip install ./sdk/python
EOF
}

"$([ $action = uninstall ] && echo uninstall || echo install_all)"
