package machine

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// TestCheckKVM holds CheckKVM to what the machine shows: without the device
// it must fail, and any failure must say which of the two it is.
func TestCheckKVM(t *testing.T) {
	err := CheckKVM()
	_, serr := os.Stat("/dev/kvm")
	if serr != nil && err == nil {
		t.Error("a guest ran without a /dev/kvm")
	}
	if serr == nil && err != nil && !errors.Is(err, errGuest) && !errors.Is(err, os.ErrPermission) {
		t.Errorf("got %v; want an error about the guest", err)
	}
	t.Logf("/dev/kvm: %v", err)
}

func TestLookNamesEachThingOnce(t *testing.T) {
	seen := map[string]bool{}
	for _, f := range Look(filepath.Join(t.TempDir(), "not", "there", "yet")) {
		if seen[f.Name] {
			t.Errorf("%s twice", f.Name)
		}
		seen[f.Name] = true
		if !f.OK && f.Detail == "" {
			t.Errorf("%s is not well and does not say why", f.Name)
		}
	}
}
