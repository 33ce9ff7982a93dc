package ocispec

import (
	"fmt"

	"github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// AddSeccomp gives spec Docker's default system call filter for this kernel
// and the capabilities of spec. It is for runtimes that share the host's kernel;
// gVisor answers system calls itself.
func AddSeccomp(spec *specs.Spec) error {
	profile, err := seccomp.GetDefaultProfile(spec)
	if err != nil {
		return fmt.Errorf("make the system call filter for this kernel: %w", err)
	}
	spec.Linux.Seccomp = profile
	return nil
}
