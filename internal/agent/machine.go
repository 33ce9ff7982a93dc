package agent

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/kernflux/opendsec/api/gen/agent/v1"
	"github.com/kernflux/opendsec/internal/agent/account"
)

// machine is what process 1 does to its own machine when it gets its
// identity. Nothing of it is worth failing for: an image may be read-only, a
// backend may have done it already, and a container may not be allowed to. So
// failures are logged and left at that.
type machine struct{ log *slog.Logger }

func (m machine) try(what string, err error) {
	if err != nil {
		m.log.Info("left undone", "what", what, "error", err)
	}
}

// settle gives the machine its names, makes the directories that every
// program expects, and then tells the programs in it of its new life.
func (m machine) settle(msg *agentv1.HelloRequest, u account.User, workdir string) {
	if msg.GetHostname() != "" {
		m.setHostname(msg.GetHostname())
	}
	if msg.GetSandboxId() != "" {
		m.setMachineID(machineID(msg.GetSandboxId()))
	}
	if msg.GetResolver() != "" {
		m.setResolver(msg.GetResolver())
	}
	if !exists("/tmp") {
		m.try("make /tmp", errors.Join(os.Mkdir("/tmp", 0o777), os.Chmod("/tmp", 0o777|fs.ModeSticky)))
	}
	for _, dir := range []string{u.Home, workdir} {
		if dir != "" && !exists(dir) {
			m.try("make "+dir, makeDirs(dir, u))
		}
	}
	if msg.GetGeneration() != "" {
		m.put(generationFile, msg.GetGeneration()+"\n", 0o644)
	}
}

// setResolver makes /etc/resolv.conf name a resolver, unless it names one
// outside of the machine. Whichever that is, the network leads to the right one.
func (m machine) setResolver(addr string) {
	const file = "/etc/resolv.conf"
	have, err := contentOf(file)
	if err == nil && namesResolver(have) {
		return
	}
	if info, lerr := os.Lstat(file); lerr == nil && info.Mode()&fs.ModeSymlink != 0 {
		// To a place of a resolver's that does not run here.
		m.try("remove the link "+file, os.Remove(file))
	}
	m.put(file, "nameserver "+addr+"\n", 0o644)
}

// namesResolver reports whether a resolv.conf names a resolver that is not on
// the loopback, where in a new machine there is none.
func namesResolver(conf string) bool {
	for line := range strings.Lines(conf) {
		fields := strings.Fields(line)
		if len(fields) < 2 || fields[0] != "nameserver" {
			continue
		}
		if addr, err := netip.ParseAddr(fields[1]); err == nil && !addr.IsLoopback() {
			return true
		}
	}
	return false
}

// generationFile holds the name of the machine's present life. It is replaced
// as a whole, last of all, so who sees a new one finds all else new.
const generationFile = "/run/opendsec/generation"

func (m machine) setHostname(name string) {
	old, err := os.Hostname()
	if err != nil || old != name {
		m.try("set the host name", syscall.Sethostname([]byte(name)))
	}
	m.put("/etc/hostname", name+"\n", 0o644)
	hosts, err := contentOf("/etc/hosts")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		m.try("read /etc/hosts", err)
		return
	}
	m.put("/etc/hosts", hostsWith(hosts, name), 0o644)
}

// machineID returns the machine id of a sandbox, as machine-id(5) wants it:
// always the same, and another one for each.
func machineID(sandboxID string) string {
	sum := sha256.Sum256([]byte("opendsec machine id of " + sandboxID))
	return hex.EncodeToString(sum[:16])
}

func (m machine) setMachineID(id string) {
	m.put("/etc/machine-id", id+"\n", 0o444)
	const dbus = "/var/lib/dbus/machine-id" // mostly a link to the other
	if info, err := os.Lstat(dbus); err == nil && info.Mode().IsRegular() {
		m.put(dbus, id+"\n", 0o444)
	}
}

// put has a file have the content, see the function of this name.
func (m machine) put(file, content string, mode fs.FileMode) {
	m.try("write "+file, put(file, content, mode))
}

// ownAddress is where the machine's own name leads in /etc/hosts. No other
// line uses it, so an earlier name of ours can be told and replaced.
const ownAddress = "127.0.1.1"

// hostsWith returns the content of /etc/hosts with the machine's name in it
// and no earlier one of ours. A line that the image or somebody inside gave the
// name stays, and is enough.
func hostsWith(hosts, name string) string {
	var keep []string
	localhost, named := false, false
	for line := range strings.Lines(hosts) {
		plain, _, _ := strings.Cut(line, "#")
		fields := strings.Fields(plain)
		if len(fields) > 0 && fields[0] == ownAddress {
			continue
		}
		for i, f := range fields {
			named = named || i > 0 && f == name
			localhost = localhost || i > 0 && f == "localhost"
		}
		keep = append(keep, line)
	}
	var ours string
	if !localhost {
		ours = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
	}
	if !named {
		ours += ownAddress + "\t" + name + "\n"
	}
	kept := strings.Join(keep, "")
	if ours != "" && kept != "" && !strings.HasSuffix(kept, "\n") {
		kept += "\n"
	}
	return kept + ours
}

// makeDirs makes a directory with its parents; what is new belongs to the user.
func makeDirs(dir string, u account.User) error {
	err := os.Mkdir(dir, 0o755)
	if errors.Is(err, fs.ErrNotExist) && dir != "/" {
		if err := makeDirs(path.Dir(dir), u); err != nil {
			return err
		}
		err = os.Mkdir(dir, 0o755)
	}
	if err == nil {
		return os.Lchown(dir, int(u.UID), int(u.GID))
	}
	if errors.Is(err, fs.ErrExist) {
		info, serr := os.Stat(dir)
		if serr != nil {
			return serr
		}
		if info.IsDir() {
			return nil
		}
		return &fs.PathError{Op: "mkdir", Path: dir, Err: syscall.ENOTDIR}
	}
	return err
}

// maxClockError is by how much a clock may be wrong before it is set.
const maxClockError = 50 * time.Millisecond

func (m machine) setClock(now *timestamppb.Timestamp) {
	if now == nil {
		return
	}
	right := now.AsTime()
	if wrong := time.Since(right).Abs(); wrong <= maxClockError {
		return
	}
	ts := unix.NsecToTimespec(right.UnixNano())
	m.try("set the clock", unix.ClockSettime(unix.CLOCK_REALTIME, &ts))
}

// stir adds to the kernel's random numbers, and has it take new seeds from
// them at once where it lets us.
func (m machine) stir(entropy []byte) {
	if len(entropy) == 0 {
		return
	}
	const file = "/dev/urandom"
	fd, err := open(unix.AT_FDCWD, file, unix.O_WRONLY, 0)
	if err != nil {
		m.try("stir the random numbers", err)
		return
	}
	defer unix.Close(fd)
	m.try("stir the random numbers", write(fd, file, string(entropy)))
	const reseed = 0x5207               // RNDRESEEDCRNG, <linux/random.h>
	_ = unix.IoctlSetInt(fd, reseed, 0) // only with CAP_SYS_ADMIN
}
