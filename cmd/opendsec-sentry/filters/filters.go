// Package filters holds the sentry's own seccomp program, compiled ahead. A
// sentry from gVisor's Go module has none and would spend 20 ms of each start
// on it. There is a program for the one way in which the gvisor backend runs
// the sentry; any other way still works, with a program compiled at the start.
//
// The rules are gVisor's; nothing is added to what it allows.
package filters

import (
	"fmt"
	_ "unsafe" // for go:linkname

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/seccomp"
	"gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"
	"gvisor.dev/gvisor/pkg/sentry/platform/systrap"
	"gvisor.dev/gvisor/runsc/boot/filter"
	"gvisor.dev/gvisor/runsc/boot/filter/config"
)

//go:generate go run ./gen programs_amd64.go

// gVisor fills this map from code that only its own build makes.
//
//go:linkname programs gvisor.dev/gvisor/runsc/boot/filter.precompiledPrograms
var programs map[string]precompiledseccomp.Program

// rules are gVisor's rules with stand-ins for what is known at run time only.
//
//go:linkname rules gvisor.dev/gvisor/runsc/boot/filter/config.rules
func rules(opt config.Options, vars precompiledseccomp.Values) (allow, deny seccomp.SyscallRules)

// Options says in which way the gvisor backend runs the sentry: systrap, a
// network of its own, and access to files by descriptors.
func Options() config.Options {
	return config.Options{
		Platform:       (*systrap.Systrap)(nil).SeccompInfo(),
		HostFilesystem: true,
	}
}

// Register makes the programs known to the filter package of this process.
func Register() {
	filter.ListPrecompiled() // makes the map, once; a later call would not
	for _, p := range compiled() {
		programs[p.Name] = p
	}
}

// selfPID is gVisor's name for the variable that is the sentry's process id.
const selfPID = "self_pid"

// Compile compiles the program for Options. The result is the same each time.
func Compile() (precompiledseccomp.Program, error) {
	opt := Options()
	var names []string
	for name := range opt.Vars() {
		names = append(names, name)
	}
	p, err := precompiledseccomp.Precompile(opt.ConfigKey(), names, func(vars precompiledseccomp.Values) *seccomp.Program {
		allow, deny := rules(opt, vars)
		allow = allow.Copy()
		// Here the rules name the process that compiles them, where they mean
		// the sentry.
		allow.Remove(unix.SYS_RT_TGSIGQUEUEINFO)
		allow.Set(unix.SYS_RT_TGSIGQUEUEINFO, seccomp.PerArg{
			seccomp.EqualTo(vars.GetUint64(selfPID)), seccomp.AnyValue{}, seccomp.EqualTo(unix.SIGKILL),
		})
		return &seccomp.Program{
			RuleSets: []seccomp.RuleSet{
				{Rules: deny.Copy()},
				{Rules: allow, Action: seccomp.Allow},
			},
			Options: config.SeccompOptions(opt),
		}
	})
	if err != nil {
		return p, fmt.Errorf("compile the sentry's seccomp program: %w", err)
	}
	return p, nil
}
