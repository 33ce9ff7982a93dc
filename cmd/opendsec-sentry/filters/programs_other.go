//go:build !amd64

package filters

import "gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"

// compiled has nothing for this architecture: the sentry compiles its program
// when it starts.
func compiled() []precompiledseccomp.Program { return nil }
