package agent

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

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

// settle sets the host name and makes the directories that every program
// expects.
func (m machine) settle(hostname string, u account.User, workdir string) {
	if hostname != "" {
		m.setHostname(hostname)
	}
	if !exists("/tmp") {
		m.try("make /tmp", errors.Join(os.Mkdir("/tmp", 0o777), os.Chmod("/tmp", 0o777|fs.ModeSticky)))
	}
	for _, dir := range []string{u.Home, workdir} {
		if dir != "" && !exists(dir) {
			m.try("make "+dir, makeDirs(dir, u))
		}
	}
}

func (m machine) setHostname(name string) {
	old, err := os.Hostname()
	if err != nil || old != name {
		m.try("set the host name", syscall.Sethostname([]byte(name)))
	}
	if !exists("/etc") {
		m.try("make /etc", os.Mkdir("/etc", 0o755))
	}
	m.try("write /etc/hostname", writeIfDifferent("/etc/hostname", name+"\n"))
	hosts, err := os.ReadFile("/etc/hosts")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		m.try("read /etc/hosts", err)
		return
	}
	m.try("write /etc/hosts", writeIfDifferent("/etc/hosts", hostsWith(string(hosts), name)))
}

// ownAddress is where the machine's own name leads in /etc/hosts. No other
// line uses it, so an earlier name of ours can be told and replaced.
const ownAddress = "127.0.1.1"

// hostsWith returns the content of /etc/hosts with the machine's name in it,
// unchanged if it names it already.
func hostsWith(hosts, name string) string {
	var keep []string
	localhost := false
	for line := range strings.Lines(hosts) {
		plain, _, _ := strings.Cut(line, "#")
		fields := strings.Fields(plain)
		for i, f := range fields {
			if i > 0 && f == name {
				return hosts
			}
			localhost = localhost || i > 0 && f == "localhost"
		}
		if len(fields) > 0 && fields[0] == ownAddress {
			continue
		}
		keep = append(keep, strings.TrimRight(line, "\n")+"\n")
	}
	if !localhost {
		keep = append(keep, "127.0.0.1\tlocalhost\n", "::1\tlocalhost ip6-localhost ip6-loopback\n")
	}
	return strings.Join(keep, "") + ownAddress + "\t" + name + "\n"
}

func writeIfDifferent(file, content string) error {
	if have, err := os.ReadFile(file); err == nil && string(have) == content {
		return nil
	}
	return os.WriteFile(file, []byte(content), 0o644)
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
	f, err := os.OpenFile("/dev/urandom", os.O_WRONLY, 0)
	if err != nil {
		m.try("stir the random numbers", err)
		return
	}
	defer f.Close()
	_, err = f.Write(entropy)
	m.try("stir the random numbers", err)
	const reseed = 0x5207                        // RNDRESEEDCRNG, <linux/random.h>
	_ = unix.IoctlSetInt(int(f.Fd()), reseed, 0) // only with CAP_SYS_ADMIN
}
