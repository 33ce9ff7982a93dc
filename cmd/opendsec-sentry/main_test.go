package main

import (
	"strings"
	"testing"
)

func TestVersionNamesTheModuleAndTheRevision(t *testing.T) {
	for linked, want := range map[string]string{
		"v1.2.3": "v1.2.3+" + revision,
		unnamed:  recorded() + "+" + revision,
		"":       recorded() + "+" + revision,
	} {
		if got := fullVersion(linked); got != want {
			t.Errorf("linked with %q: %q; want %q", linked, got, want)
		}
	}
	if strings.Contains(recorded(), unnamed) {
		t.Error("the build does not record the version of gVisor's module")
	}
	if runtimeVersion == "" {
		t.Error("gVisor's version is another variable: a sentry would not set it")
	}
}
