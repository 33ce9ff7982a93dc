package apiserver

import (
	"cmp"
	"math"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// What a spec may hold. Placement knows the sizes of the nodes; the bounds
// here only keep out what no machine could have.
const (
	minCPU      = 0.1
	minMemoryMB = 64
	minDiskMB   = 16
	minPIDs     = 16
	maxCPU      = 4096    // cores
	maxMemoryMB = 1 << 30 // 1 PiB
	maxDiskMB   = 1 << 40
	maxPIDs     = 1 << 22 // the kernel's own bound

	minTTL = time.Second
	maxTTL = 10 * 365 * 24 * time.Hour

	maxEnv         = 512
	maxEnvBytes    = 64 << 10 // in all
	maxPath        = 4096
	maxLabels      = 64
	maxLabelValue  = 255
	maxMetadata    = 16 << 10 // bytes in all
	maxHostname    = 63
	maxIdempotency = 128
)

var (
	envName      = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_.-]{0,254}$`)
	userForm     = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}(:[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63})?$`)
	labelKey     = regexp.MustCompile(`^[a-z0-9._/-]{1,63}$`)
	hostnameForm = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*$`)
)

// checkSpec fills the defaults of a spec, but for limits, whose defaults may be
// the image's, and refuses, by the field's name, what is wrong with it.
func checkSpec(s *sandbox.Spec) error {
	for _, check := range []func(*sandbox.Spec) error{
		checkBackend, checkLimits, checkDeadlines, checkProcess, checkHostname, checkMarks, checkRules,
	} {
		if err := check(s); err != nil {
			return err
		}
	}
	return nil
}

func checkBackend(s *sandbox.Spec) error {
	switch s.Backend {
	case "":
		s.Backend = sandbox.Auto
		return nil
	case sandbox.Auto:
		return nil
	}
	names := []string{string(sandbox.Auto)}
	for _, b := range sandbox.Backends {
		if b == s.Backend {
			return nil
		}
		names = append(names, string(b))
	}
	err := fault.Invalid("spec.backend", "unknown backend %q: use one of %s", s.Backend, strings.Join(names, ", "))
	err.Backends = sandbox.Backends
	return err
}

func checkLimits(s *sandbox.Spec) error {
	l := s.Limits
	if math.IsNaN(l.CPU) || math.IsInf(l.CPU, 0) {
		return fault.Invalid("spec.cpu_cores_limit", "cpu_cores_limit must be a number, not %v", l.CPU)
	}
	if l.CPU != 0 && (l.CPU < minCPU || l.CPU > maxCPU) {
		return fault.Invalid("spec.cpu_cores_limit", "cpu_cores_limit must be from %v to %v cores, not %v", minCPU, maxCPU, l.CPU)
	}
	for _, f := range []struct {
		name        string
		value       int64
		least, most int64
	}{
		{"memory_limit_mb", l.MemoryMB, minMemoryMB, maxMemoryMB},
		{"disk_limit_mb", l.DiskMB, minDiskMB, maxDiskMB},
		{"pids_limit", l.PIDs, minPIDs, maxPIDs},
	} {
		if f.value != 0 && (f.value < f.least || f.value > f.most) {
			return fault.Invalid("spec."+f.name, "%s must be from %d to %d, not %d", f.name, f.least, f.most, f.value)
		}
	}
	return nil
}

// defaultLimits are those of a sandbox whose caller, and whose image, name none.
var defaultLimits = sandbox.Limits{CPU: 1, MemoryMB: 512, DiskMB: 10240, PIDs: 1024}

// fillLimits takes the limits that are 0 from others.
func fillLimits(l *sandbox.Limits, from sandbox.Limits) {
	l.CPU = cmp.Or(l.CPU, from.CPU)
	l.MemoryMB = cmp.Or(l.MemoryMB, from.MemoryMB)
	l.DiskMB = cmp.Or(l.DiskMB, from.DiskMB)
	l.PIDs = cmp.Or(l.PIDs, from.PIDs)
}

// checkDeadlines accepts 0, which is never, and checkTTL's range.
func checkDeadlines(s *sandbox.Spec) error {
	if err := checkTTL("spec.ttl_running_stop", s.Deadlines.Idle); err != nil {
		return err
	}
	if err := checkTTL("spec.ttl_lifetime", s.Deadlines.Lifetime); err != nil {
		return err
	}
	switch s.OnIdle {
	case "":
		s.OnIdle = sandbox.StopOnIdle
	case sandbox.StopOnIdle, sandbox.PauseOnIdle:
	default:
		return fault.Invalid("spec.on_idle", "unknown on_idle %q: use stop or pause", s.OnIdle)
	}
	return nil
}

func checkTTL(field string, d time.Duration) error {
	name := field[strings.LastIndexByte(field, '.')+1:]
	if d != 0 && (d < minTTL || d > maxTTL) {
		return fault.Invalid(field, "%s must be from 1s to ten years, or absent for never, not %s", name, d)
	}
	return nil
}

// checkProcess checks what the processes of a sandbox get.
func checkProcess(s *sandbox.Spec) error {
	if len(s.Env) > maxEnv {
		return fault.Invalid("spec.env", "env has %d variables: at most %d", len(s.Env), maxEnv)
	}
	size := 0
	for name, value := range s.Env {
		if !envName.MatchString(name) {
			return fault.Invalid("spec.env", "env: %q is not the name of a variable: want up to 255 of [A-Za-z0-9_.-] and no digit first", name)
		}
		if strings.ContainsRune(value, 0) {
			return fault.Invalid("spec.env", "env: the value of %s has a zero byte", name)
		}
		size += len(name) + len(value) + 2
	}
	if size > maxEnvBytes {
		return fault.Invalid("spec.env", "env takes %d bytes: at most %d", size, maxEnvBytes)
	}
	if s.Workdir != "" && (s.Workdir[0] != '/' || len(s.Workdir) > maxPath || strings.ContainsRune(s.Workdir, 0)) {
		return fault.Invalid("spec.workdir", "workdir must be an absolute path of up to %d bytes, not %.80q", maxPath, s.Workdir)
	}
	if s.User != "" && !userForm.MatchString(s.User) {
		return fault.Invalid("spec.user", "user must be a name or a number, with \":group\" if need be, not %.80q", s.User)
	}
	return nil
}

func checkHostname(s *sandbox.Spec) error {
	if s.Hostname == "" {
		return nil
	}
	if len(s.Hostname) > maxHostname || !hostnameForm.MatchString(s.Hostname) {
		return fault.Invalid("spec.hostname", "hostname must be up to %d of letters, digits, - and ., beginning and ending with a letter or digit (RFC 1123), not %.80q", maxHostname, s.Hostname)
	}
	return nil
}

// checkMarks checks labels and metadata.
func checkMarks(s *sandbox.Spec) error {
	if err := checkLabels("spec.labels", s.Labels); err != nil {
		return err
	}
	size := 0
	for k, v := range s.Metadata {
		size += len(k) + len(v)
	}
	if size > maxMetadata {
		return fault.Invalid("spec.metadata", "metadata takes %d bytes: at most %d", size, maxMetadata)
	}
	return nil
}

func checkLabels(field string, labels map[string]string) error {
	if len(labels) > maxLabels {
		return fault.Invalid(field, "%d labels: at most %d", len(labels), maxLabels)
	}
	for k, v := range labels {
		if !labelKey.MatchString(k) {
			return fault.Invalid(field, "label %.80q: keys are up to 63 of [a-z0-9._/-]", k)
		}
		if len(v) > maxLabelValue || !utf8.ValidString(v) {
			return fault.Invalid(field, "label %s: its value has %d bytes: at most %d", k, len(v), maxLabelValue)
		}
	}
	return nil
}

func checkIdempotencyKey(key string) error {
	if len(key) > maxIdempotency {
		return fault.Invalid("idempotency_key", "idempotency_key has %d bytes: at most %d", len(key), maxIdempotency)
	}
	return nil
}
