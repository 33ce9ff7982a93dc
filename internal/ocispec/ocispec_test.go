package ocispec

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/kernflux/opendsec/internal/sandbox"
)

func TestBuildPutsLimitsIntoResources(t *testing.T) {
	spec := Build(Options{Limits: sandbox.Limits{CPU: 1.5, MemoryMB: 512, PIDs: 100}, LimitSwap: true})
	r := spec.Linux.Resources
	got := []any{*r.CPU.Quota, *r.CPU.Period, *r.CPU.Shares, *r.Memory.Limit, *r.Memory.Swap, r.Pids.Limit}
	want := []any{int64(150000), uint64(100000), uint64(1536), int64(512 << 20), int64(512 << 20), int64(100)}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("resources (-want +got):\n%s", diff)
	}
}

func TestBuildLeavesOutWhatIsNotLimited(t *testing.T) {
	r := Build(Options{}).Linux.Resources
	if r.CPU != nil || r.Memory != nil || r.Pids != nil {
		t.Errorf("got limits %+v without asking for any", r)
	}
}

func TestBuildNamespaces(t *testing.T) {
	types := func(o Options) []specs.LinuxNamespaceType {
		var all []specs.LinuxNamespaceType
		for _, ns := range Build(o).Linux.Namespaces {
			all = append(all, ns.Type)
		}
		return all
	}
	if all := types(Options{}); slices.Contains(all, specs.CgroupNamespace) || slices.Contains(all, specs.UserNamespace) || len(all) != 5 {
		t.Errorf("namespaces without options: %v", all)
	}
	if all := types(Options{CgroupNS: true}); !slices.Contains(all, specs.CgroupNamespace) {
		t.Errorf("no cgroup namespace in %v", all)
	}
	for _, ns := range Build(Options{NetNS: "/run/netns/x"}).Linux.Namespaces {
		if want := map[bool]string{true: "/run/netns/x"}[ns.Type == specs.NetworkNamespace]; ns.Path != want {
			t.Errorf("namespace %s has path %q, want %q", ns.Type, ns.Path, want)
		}
	}
}

func TestBuildGivesNoDangerousCapability(t *testing.T) {
	c := Build(Options{}).Process.Capabilities
	for _, bad := range []string{"CAP_SYS_ADMIN", "CAP_SYS_PTRACE", "CAP_SYS_MODULE", "CAP_NET_ADMIN", "CAP_SYS_RESOURCE", "CAP_BPF", "CAP_DAC_READ_SEARCH"} {
		if slices.Contains(c.Bounding, bad) {
			t.Errorf("the sandbox may gain %s", bad)
		}
	}
	if len(c.Inheritable) != 0 || len(c.Ambient) != 0 {
		t.Errorf("users inherit %v and %v", c.Inheritable, c.Ambient)
	}
}

func TestAddSeccomp(t *testing.T) {
	spec := Build(Options{})
	if err := AddSeccomp(spec); err != nil {
		t.Fatal(err)
	}
	s := spec.Linux.Seccomp
	if s.DefaultAction != specs.ActErrno || len(s.Architectures) == 0 {
		t.Fatalf("the filter does not refuse by default: %+v", s)
	}
	allowed := func(name string) bool {
		return slices.ContainsFunc(s.Syscalls, func(c specs.LinuxSyscall) bool {
			return c.Action == specs.ActAllow && len(c.Args) == 0 && slices.Contains(c.Names, name)
		})
	}
	for _, name := range []string{"read", "execve", "epoll_pwait2", "close_range"} {
		if !allowed(name) {
			t.Errorf("%s is refused", name)
		}
	}
	for _, name := range []string{"mount", "bpf", "kexec_load", "init_module", "setns", "unshare", "add_key", "keyctl", "open_by_handle_at", "io_uring_setup"} {
		if allowed(name) {
			t.Errorf("%s is allowed", name)
		}
	}
}
