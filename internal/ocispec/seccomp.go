package ocispec

import (
	"fmt"
	"slices"

	"github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// families are the socket families that a sandbox may use: Unix, IPv4, IPv6,
// netlink (without capabilities it only reads) and packet (which needs
// CAP_NET_RAW). Docker allows some thirty, of which the rest serve hardware and
// telephony, and have been a way into the kernel more than once.
var families = []uint64{unix.AF_UNIX, unix.AF_INET, unix.AF_INET6, unix.AF_NETLINK, unix.AF_PACKET}

// AddSeccomp gives spec Docker's default system call filter for this kernel
// and the capabilities of spec, with fewer socket families and without the x32
// ABI, which nothing uses: that makes it stricter, and quicker to compile. It
// is for runtimes that share the host's kernel; gVisor answers system calls
// itself.
func AddSeccomp(spec *specs.Spec) error {
	profile, err := seccomp.GetDefaultProfile(spec)
	if err != nil {
		return fmt.Errorf("make the system call filter for this kernel: %w", err)
	}
	profile.Architectures = slices.DeleteFunc(profile.Architectures, func(a specs.Arch) bool { return a == specs.ArchX32 })
	profile.Syscalls = slices.DeleteFunc(profile.Syscalls, func(c specs.LinuxSyscall) bool {
		return slices.Contains(c.Names, "socket")
	})
	for _, f := range families {
		profile.Syscalls = append(profile.Syscalls, specs.LinuxSyscall{
			Names:  []string{"socket"},
			Action: specs.ActAllow,
			Args:   []specs.LinuxSeccompArg{{Index: 0, Value: f, Op: specs.OpEqualTo}},
		})
	}
	spec.Linux.Seccomp = profile
	return nil
}
