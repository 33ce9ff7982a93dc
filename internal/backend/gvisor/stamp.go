package gvisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/cpuid"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// virtualization is how the sentry runs the sandbox's code.
const virtualization = "systrap"

// stamp says what a machine runs with, but for the version of its sentry,
// which its snapshot itself tells.
func (s *sentry) stamp() backend.Stamp {
	st := backend.Stamp{Virtualization: virtualization, CPUFeatures: s.Features, Agent: s.Agent}
	if st.CPUFeatures == nil {
		st.CPUFeatures = hostFeatures()
	}
	var uts unix.Utsname
	if err := unix.Uname(&uts); err == nil {
		st.Kernel = unix.ByteSliceToString(uts.Release[:])
	}
	return st
}

// hostFeatures names the features of this host's CPU, sorted.
var hostFeatures = sync.OnceValue(func() []string {
	cpuid.Initialize()
	set := cpuid.HostFeatureSet()
	var names []string
	for _, f := range cpuid.AllFeatures() {
		if set.HasFeature(f) {
			names = append(names, f.String())
		}
	}
	slices.Sort(names)
	return names
})

// runtimeVersion is what the sentry's binary calls itself, and of which binary
// that was said.
type runtimeVersion struct {
	mu   sync.Mutex
	of   os.FileInfo
	said string
}

// versionPatience bounds how long a sentry may take to say its version.
const versionPatience = 10 * time.Second

// get returns the version of the sentry at path. It asks the binary once, and
// again when it is another.
func (v *runtimeVersion) get(path string) (string, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	is, err := os.Stat(path)
	if err != nil {
		return "", fmt.Errorf("version of the sentry: %w", err)
	}
	if v.of != nil && os.SameFile(v.of, is) && v.of.ModTime().Equal(is.ModTime()) && v.of.Size() == is.Size() {
		return v.said, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), versionPatience)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "--version")
	cmd.Env = []string{}
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("version of the sentry %s: %w", path, err)
	}
	line, _, _ := strings.Cut(string(out), "\n")
	said, ok := strings.CutPrefix(line, "runsc version ")
	if !ok || said == "" {
		return "", fmt.Errorf("version of the sentry %s: it says %q", path, line)
	}
	v.of, v.said = is, said
	return said, nil
}

// sentryVersion returns the version of sentries that are started now, "" when
// it cannot be told.
func (b *Backend) sentryVersion() string {
	said, err := b.version.get(b.opts.SentryPath)
	if err != nil {
		b.log.Warn("cannot tell the version of the sentry: machines will not share memory", "error", err)
	}
	return said
}

// CanRestore returns why a snapshot cannot be started on this node.
func (b *Backend) CanRestore(s backend.Snapshot) error {
	if s.Backend != sandbox.GVisor {
		return fmt.Errorf("the snapshot was made with the backend %s, and memory of one backend cannot run on another (here %s)", s.Backend, sandbox.GVisor)
	}
	if !s.Memory {
		return nil // files run anywhere
	}
	if s.Stamp.Virtualization != virtualization {
		return fmt.Errorf("the snapshot was made with virtualization by %s; this node has %s", s.Stamp.Virtualization, virtualization)
	}
	said, err := b.version.get(b.opts.SentryPath)
	if err != nil {
		return err
	}
	if s.Stamp.Runtime != said {
		return fmt.Errorf("the snapshot was made with gVisor %s; this node has %s, and memory can be restored by the same version only", s.Stamp.Runtime, said)
	}
	var missing []string
	for _, f := range s.Stamp.CPUFeatures {
		if _, ok := slices.BinarySearch(hostFeatures(), f); !ok {
			missing = append(missing, f)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("the snapshot needs features that this node's CPU lacks: %s", strings.Join(missing, ", "))
	}
	return nil
}

// checkFrom refuses a state that cannot become the machine of cfg.
func (b *Backend) checkFrom(cfg backend.Config) error {
	from := cfg.From
	if from == nil {
		return nil
	}
	if err := b.CanRestore(*from); err != nil {
		return err
	}
	if !from.Memory {
		return nil
	}
	was := cfg
	was.Limits = from.Limits
	switch {
	case keyOf(was) != keyOf(cfg):
		return fmt.Errorf("the snapshot's limits are %+v, the machine's %+v; with memory they must be the same", from.Limits, cfg.Limits)
	case from.Stamp.Agent != cfg.Agent.ID:
		return fmt.Errorf("the snapshot was made with the agent %s, and the machine has %s", from.Stamp.Agent, cfg.Agent.ID)
	case from.Dir == "":
		return errors.New("the snapshot has no directory")
	}
	return nil
}
