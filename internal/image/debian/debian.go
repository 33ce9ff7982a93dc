// Package debian builds a Debian file tree from the machine's own package
// mirror with mmdebstrap, with the machine's extra root certificates in it, so
// that a node without a registry in reach has an image to start from, and so
// that pip and curl work behind a proxy that opens TLS. It makes a directory;
// what becomes of it is package image's business.
package debian

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kernflux/opendsec/internal/fault"
)

// Packages are what the image has beside Debian's minimal base.
var Packages = []string{
	"ca-certificates", "curl", "git", "iproute2", "less", "procps",
	"python-is-python3", "python3", "python3-pip", "python3-venv",
}

// bundle is where Debian keeps the root certificates in one file.
const bundle = "/etc/ssl/certs/ca-certificates.crt"

// Env is the environment that makes programs in the image work: those that
// bring their own root certificates are pointed to the image's.
var Env = []string{
	"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
	"LANG=C.UTF-8",
	"SSL_CERT_FILE=" + bundle,
	"REQUESTS_CA_BUNDLE=" + bundle,
	"NODE_EXTRA_CA_CERTS=" + bundle,
	"PIP_CERT=" + bundle,
	"PIP_ROOT_USER_ACTION=ignore",
	"PIP_BREAK_SYSTEM_PACKAGES=1", // its Python is the sandbox's own to fill
	"PIP_DISABLE_PIP_VERSION_CHECK=1",
}

// Options says what to build.
type Options struct {
	Tree     string   // an empty directory
	Work     string   // a directory for work files
	Packages []string // beside Packages
	// Line, if not nil, is called with each line that mmdebstrap prints.
	Line func(string)
	// Now is the time of the build: what is newer in the tree gets the time of
	// the newest package file, so that builds differ as little as they can.
	Now time.Time
}

var packageName = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]+(=[A-Za-z0-9.+:~-]+)?$`)

// Build makes the tree. A bad package name is a fault.InvalidArgument for the
// field "packages"; without mmdebstrap the fault.Unavailable says what to do.
// After an error the tree is of no use.
func Build(ctx context.Context, o Options) error {
	for _, p := range o.Packages {
		if !packageName.MatchString(p) {
			return fault.Invalid("packages", "%q is no name of a Debian package", p)
		}
	}
	if _, err := exec.LookPath("mmdebstrap"); err != nil {
		return fault.New(fault.Unavailable, "mmdebstrap is not installed on the node; run: apt-get install mmdebstrap")
	}
	release, err := machineRelease("/etc/os-release")
	if err != nil {
		return err
	}
	args, err := o.prepare(ctx, release)
	if err != nil {
		return err
	}
	if err := o.run(ctx, args); err != nil {
		return err
	}
	return finish(o.Tree, o.Now)
}

// prepare writes what mmdebstrap reads and returns its arguments.
func (o Options) prepare(ctx context.Context, release release) ([]string, error) {
	sources, err := machineSources("/etc/apt", release)
	if err != nil {
		return nil, err
	}
	sourcesFile := filepath.Join(o.Work, "debian.sources")
	if err := os.WriteFile(sourcesFile, []byte(sources), 0o644); err != nil {
		return nil, fmt.Errorf("write the package sources: %w", err)
	}
	aptConf := filepath.Join(o.Work, "apt.conf")
	if err := os.WriteFile(aptConf, machineAptConf(ctx), 0o600); err != nil {
		return nil, fmt.Errorf("write apt's configuration: %w", err)
	}
	certs := filepath.Join(o.Work, "certificates")
	if err := os.Mkdir(certs, 0o755); err != nil {
		return nil, fmt.Errorf("make a directory for certificates: %w", err)
	}
	if err := writeExtraCertificates(machineCertificates, certs); err != nil {
		return nil, err
	}
	include := strings.Join(append(append([]string{}, Packages...), o.Packages...), ",")
	return []string{
		// Root is the mode that works in containers and VMs alike.
		"--mode=root", "--variant=minbase", "--format=directory", "--aptopt=" + aptConf,
		// Its user cannot enter the store; signatures are checked all the same.
		`--aptopt=APT::Sandbox::User "root"`,
		// Nothing of the tree needs to survive a power cut.
		"--dpkgopt=force-unsafe-io", "--include=" + include,
		"--customize-hook=sync-in " + shellQuote(certs) + " /usr/local/share/ca-certificates",
		`--customize-hook=chroot "$1" update-ca-certificates`,
		release.suite, o.Tree, sourcesFile,
	}, nil
}

func shellQuote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// run runs mmdebstrap in mount and process namespaces of its own: when it is
// stopped, or we are, all its processes and mounts go with it.
func (o Options) run(ctx context.Context, args []string) error {
	cmd := exec.CommandContext(ctx, "mmdebstrap", args...)
	cmd.Env = append(os.Environ(), "TMPDIR="+o.Work, "LC_ALL=C.UTF-8")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWPID, Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL,
	}
	tail := &lines{show: o.Line}
	cmd.Stdout, cmd.Stderr = tail, tail
	runtime.LockOSThread() // Pdeathsig comes when the starting thread ends
	err := cmd.Run()
	runtime.UnlockOSThread()
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case tail.has("No space left on device"):
		return fault.New(fault.Capacity, "build the Debian tree: the disk is full: %w", err)
	case tail.has("Unable to locate package"), tail.has("has no installation candidate"):
		return fault.Invalid("packages", "build the Debian tree: %s", tail.text())
	}
	return fault.New(fault.Unavailable, "build the Debian tree: %w: %s", err, tail.text())
}

// lines hands on whole lines and keeps the last for errors.
type lines struct {
	show func(string)

	mu   sync.Mutex
	rest string
	last []string
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	// apt redraws its progress with carriage returns.
	parts := strings.Split(strings.ReplaceAll(l.rest+string(p), "\r", "\n"), "\n")
	l.rest = parts[len(parts)-1]
	for _, line := range parts[:len(parts)-1] {
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		if l.last = append(l.last, line); len(l.last) > 200 {
			l.last = l.last[1:]
		}
		if l.show != nil {
			l.show(line)
		}
	}
	return len(p), nil
}

func (l *lines) has(text string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(strings.Join(l.last, "\n"), text)
}

// text returns the lines that say what went wrong: errors, or the last few.
func (l *lines) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var bad []string
	for _, line := range l.last {
		if strings.HasPrefix(line, "E: ") || strings.HasPrefix(line, "Err:") || strings.Contains(line, "rror:") {
			bad = append(bad, line)
		}
	}
	if len(bad) == 0 {
		bad = l.last
	}
	return strings.Join(bad[max(0, len(bad)-5):], "; ")
}

// release is what os-release says.
type release struct {
	debian bool
	suite  string // code name
}

// defaultSuite is built on machines that are not Debian.
const defaultSuite = "bookworm"

func machineRelease(file string) (release, error) {
	f, err := os.Open(file)
	if errors.Is(err, os.ErrNotExist) {
		return release{suite: defaultSuite}, nil
	}
	if err != nil {
		return release{}, fmt.Errorf("find out the machine's distribution: %w", err)
	}
	defer f.Close()
	return parseRelease(f), nil
}

func parseRelease(r io.Reader) release {
	found := map[string]string{}
	for s := bufio.NewScanner(r); s.Scan(); {
		if key, value, ok := strings.Cut(s.Text(), "="); ok {
			found[key] = strings.Trim(value, `"'`)
		}
	}
	if found["ID"] != "debian" || found["VERSION_CODENAME"] == "" {
		return release{suite: defaultSuite}
	}
	return release{debian: true, suite: found["VERSION_CODENAME"]}
}
