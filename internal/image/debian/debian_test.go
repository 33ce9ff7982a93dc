package debian

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kernflux/opendsec/internal/fault"
)

func write(t *testing.T, name, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

// Only the distribution's own sources come into the image.
func TestMachineSources(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "sources.list"), `
# deb http://old/debian bookworm main
deb [arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://mirror.example/debian bookworm main contrib # ours
deb-src http://mirror.example/debian bookworm main
deb cdrom:[Debian]/ bookworm main
deb [signed-by=/usr/share/keyrings/hashicorp.gpg] https://apt.example bookworm main
deb https://download.docker.example/linux/debian bookworm stable
deb http://apt.postgresql.example/pub/repos/apt bookworm-pgdg main
deb http://mirror.example/debian trixie main
`)
	write(t, filepath.Join(dir, "sources.list.d", "debian.sources"), `Types: deb deb-src
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main
Enabled: no

Types: deb
URIs: https://key.example
Suites: bookworm
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 -----END PGP PUBLIC KEY BLOCK-----
`)
	write(t, filepath.Join(dir, "sources.list.d", "ignored.save"), "deb http://saved.example bookworm main\n")
	got, err := machineSources(dir, release{debian: true, suite: "bookworm"})
	if err != nil {
		t.Fatal(err)
	}
	const want = `Types: deb
URIs: http://mirror.example/debian
Suites: bookworm
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

`
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("sources (-want +got):\n%s", diff)
	}
}

func TestParseRelease(t *testing.T) {
	for text, want := range map[string]release{
		"ID=debian\nVERSION_CODENAME=trixie\n":                {debian: true, suite: "trixie"},
		"ID=ubuntu\nID_LIKE=debian\nVERSION_CODENAME=noble\n": {suite: defaultSuite},
		"": {suite: defaultSuite},
	} {
		if got := parseRelease(strings.NewReader(text)); got != want {
			t.Errorf("parseRelease(%q) = %v, want %v", text, got, want)
		}
	}
}

func TestFilterAptConf(t *testing.T) {
	dump := "APT::Architecture \"amd64\";\nAcquire::http::Proxy \"http://u:p@proxy\";\nAcquire::Check-Date \"false\";\nAcquire::Languages \"\";\n"
	if got, want := string(filterAptConf(dump, passed)), "Acquire::http::Proxy \"http://u:p@proxy\";\nAcquire::Check-Date \"false\";\n"; got != want {
		t.Errorf("filterAptConf = %q, want %q", got, want)
	}
}

func certificate(t *testing.T, name string) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

// The machine's own authorities come into the image, each once, and those of
// the distribution do not.
func TestWriteExtraCertificates(t *testing.T) {
	dir, out := t.TempDir(), t.TempDir()
	stock, local, bundled := certificate(t, "stock"), certificate(t, "local"), certificate(t, "bundled")
	write(t, filepath.Join(dir, "stock", "mozilla", "a.crt"), stock)
	write(t, filepath.Join(dir, "local", "firm", "b.crt"), local)
	write(t, filepath.Join(dir, "local", "notes.txt"), bundled)
	write(t, filepath.Join(dir, "bundle.pem"), "# comment\n"+stock+local+bundled+bundled)
	if err := writeExtraCertificates(trust{bundle: filepath.Join(dir, "bundle.pem"), local: filepath.Join(dir, "local"), stock: filepath.Join(dir, "stock")}, out); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(out, "*.crt"))
	if err != nil || len(files) != 2 {
		t.Fatalf("files %v, %v; want two", files, err)
	}
	got := map[string]bool{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		got[string(b)] = true
	}
	if !got[local] || !got[bundled] {
		t.Errorf("wrote %v", got)
	}
	none := trust{bundle: filepath.Join(dir, "no"), local: filepath.Join(dir, "no"), stock: filepath.Join(dir, "no")}
	if err := writeExtraCertificates(none, t.TempDir()); err != nil {
		t.Errorf("on a machine without certificates: %v", err)
	}
}

func TestBuildRefuses(t *testing.T) {
	for _, p := range []string{"", "--option", "a b", "?essential", "UPPER", "x,y"} {
		err := Build(t.Context(), Options{Packages: []string{p}, Now: time.Now()})
		if !fault.Is(err, fault.InvalidArgument) || fault.Of(err).Field != "packages" {
			t.Errorf("Build with package %q = %v", p, err)
		}
	}
	t.Setenv("PATH", t.TempDir())
	if err := Build(t.Context(), Options{}); !fault.Is(err, fault.Unavailable) || !strings.Contains(err.Error(), "apt-get install mmdebstrap") {
		t.Errorf("Build without mmdebstrap = %v", err)
	}
}
