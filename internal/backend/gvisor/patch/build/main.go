// Command build builds opendsec-sentry with this project's changes of gVisor.
package main

import (
	"flag"
	"fmt"
	"os"

	"github.com/kernflux/opendsec/internal/backend/gvisor/patch"
)

func main() {
	out := flag.String("o", "", "the file to write")
	ldflags := flag.String("ldflags", "", "flags for the linker")
	flag.Parse()
	if *out == "" || flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "usage: build -o FILE [-ldflags FLAGS]")
		os.Exit(2)
	}
	if err := patch.Build(*out, *ldflags); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
