package ca

import (
	"crypto/x509"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kernflux/opendsec/internal/mtls"
)

var day = 24 * time.Hour

func mustOpen(t *testing.T, dir string, now time.Time) *CA {
	t.Helper()
	c, err := open(dir, now)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func read(t *testing.T, file string) string {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestInitKeepsTheAuthority(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "ca")
	pems := make([]string, 8)
	var wg sync.WaitGroup
	for i := range pems {
		wg.Go(func() {
			c, err := Init(dir)
			if err != nil {
				t.Error(err)
				return
			}
			pems[i] = string(c.pem)
		})
	}
	wg.Wait()
	for _, p := range pems {
		if p != pems[0] {
			t.Fatal("several that began at once made several authorities")
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	modes := map[string]os.FileMode{}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		modes[e.Name()] = info.Mode().Perm()
	}
	if len(modes) != 2 || modes["ca.pem"] != 0o644 || modes["ca-key.pem"] != 0o600 {
		t.Errorf("got files %v; want ca.pem for all and ca-key.pem for its owner", modes)
	}
}

func TestIssue(t *testing.T) {
	now := time.Now()
	c := mustOpen(t, t.TempDir(), now)
	certPEM, _, err := c.Issue("edge", []string{"node1.example", "localhost", "127.0.0.1", "::1"})
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := parse(certPEM)
	if err != nil {
		t.Fatal(err)
	}
	if leaf.IsCA || c.cert.Subject.String() == leaf.Subject.String() || !c.cert.IsCA {
		t.Error("the authority and its leaf must be two certificates")
	}
	pool := x509.NewCertPool()
	pool.AddCert(c.cert)
	for _, name := range []string{"node1.example", "localhost", "127.0.0.1", "::1"} {
		_, err := leaf.Verify(x509.VerifyOptions{Roots: pool, DNSName: name, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
		if err != nil {
			t.Errorf("as a server at %s: %v", name, err)
		}
	}
	if _, err := leaf.Verify(x509.VerifyOptions{Roots: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
		t.Errorf("as a client: %v", err)
	}
	if leaf.VerifyHostname("other.example") == nil {
		t.Error("the certificate holds for a host that was not asked for")
	}
	if len(leaf.URIs) != 1 || leaf.URIs[0].String() != "opendsec://role/edge" {
		t.Errorf("got URIs %v", leaf.URIs)
	}
	if life := leaf.NotAfter.Sub(now); life > 826*day || life < 824*day {
		t.Errorf("the certificate lasts %v", life)
	}
	for _, bad := range []string{"", "a/b", "a b", "a?b"} {
		if _, _, err := c.Issue(bad, nil); err == nil {
			t.Errorf("a certificate was issued for role %q", bad)
		}
	}
}

func TestEnsureRenews(t *testing.T) {
	dir, now := t.TempDir(), time.Now()
	file := mtls.RoleFile(dir, "iam")
	ensure := func(now time.Time, hosts ...string) string {
		t.Helper()
		if err := mustOpen(t, dir, now).Ensure("iam", hosts); err != nil {
			t.Fatal(err)
		}
		return read(t, file)
	}
	first := ensure(now, "localhost")
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v; want 0600", info.Mode(), err)
	}
	if ensure(now.Add(700*day), "localhost") != first {
		t.Error("a certificate that lasts was replaced")
	}
	if got := ensure(now, "localhost", "10.0.0.1"); got == first {
		t.Error("a certificate was not replaced for a further host")
	} else if ensure(now, "localhost") != got {
		t.Error("a certificate with more hosts than needed was replaced")
	} else if ensure(now.Add(800*day), "localhost") == got {
		t.Error("a certificate was not replaced 25 days before its end")
	}
	if err := os.WriteFile(file, []byte("junk"), 0o600); err != nil {
		t.Fatal(err)
	}
	ensure(now, "localhost")
	if _, err := mtls.Load(dir, "iam"); err != nil {
		t.Errorf("after a broken file was replaced: %v", err)
	}
}

// The authority's certificate is renewed long before its end, and those who
// hold the older one go on to be understood.
func TestAuthorityIsRenewed(t *testing.T) {
	dir, now := t.TempDir(), time.Now()
	old := mustOpen(t, dir, now)
	later := now.Add(9 * 365 * day)
	renewed := mustOpen(t, dir, later)
	if string(renewed.pem) == string(old.pem) {
		t.Fatal("the authority was not renewed a year before its end")
	}
	certPEM, _, err := renewed.Issue("edge", []string{"localhost"})
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := parse(certPEM)
	if err != nil {
		t.Fatal(err)
	}
	for name, root := range map[string]*x509.Certificate{"old": old.cert, "new": renewed.cert} {
		pool := x509.NewCertPool()
		pool.AddCert(root)
		if _, err := leaf.Verify(x509.VerifyOptions{Roots: pool, DNSName: "localhost", CurrentTime: later.Add(day)}); err != nil {
			t.Errorf("a new certificate under the %s authority: %v", name, err)
		}
	}
}

func TestInitRefusesWhatDoesNotFit(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(t *testing.T, dir string)
		want  string
	}{
		"key gone": {func(t *testing.T, dir string) {
			if err := os.Remove(filepath.Join(dir, "ca-key.pem")); err != nil {
				t.Fatal(err)
			}
		}, "ca-key.pem is not"},
		"key of another": {func(t *testing.T, dir string) {
			other := t.TempDir()
			mustOpen(t, other, time.Now())
			if err := os.WriteFile(filepath.Join(dir, "ca-key.pem"), []byte(read(t, filepath.Join(other, "ca-key.pem"))), 0o600); err != nil {
				t.Fatal(err)
			}
		}, "does not belong to"},
		"key broken": {func(t *testing.T, dir string) {
			if err := os.WriteFile(filepath.Join(dir, "ca-key.pem"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}, "no key in PEM"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			mustOpen(t, dir, time.Now())
			c.spoil(t, dir)
			if _, err := Init(dir); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}
