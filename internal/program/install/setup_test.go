package install

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kernflux/opendsec/internal/mtls"
)

// setup describes a new installation of the test's.
func setup(t *testing.T) Setup {
	dir := t.TempDir()
	return Setup{Ops: filepath.Join(dir, "ops"), State: filepath.Join(dir, "state"), Programs: "/opt/programs", Listen: "127.0.0.1:17300"}
}

func mustInit(t *testing.T, s Setup) *Installation {
	t.Helper()
	in, err := Init(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	return in
}

// contents returns the files below a directory, without those of the database.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.Contains(path, ".db") {
			return err
		}
		b, err := os.ReadFile(path)
		all[strings.TrimPrefix(path, dir)] = string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func vars(t *testing.T, path string) map[string]string {
	t.Helper()
	list, err := ReadEnv(path)
	if err != nil {
		t.Fatal(err)
	}
	m := map[string]string{}
	for _, v := range list {
		m[v[0]] = v[1]
	}
	return m
}

func TestInitMakesAll(t *testing.T) {
	s := setup(t)
	in := mustInit(t, s)
	admin, demo := vars(t, in.EnvFile()), vars(t, filepath.Join(s.Ops, "demo.env"))
	for name, want := range map[string]string{
		"OPENDSEC_ADDR": "https://127.0.0.1:17300", "OPENDSEC_CA": filepath.Join(s.Ops, "ca", "ca.pem"), "OPENDSEC_PROJECT": "root",
	} {
		if admin[name] != want {
			t.Errorf("env has %s=%q, want %q", name, admin[name], want)
		}
	}
	if demo["OPENDSEC_PROJECT"] != "root/demo" || demo["OPENDSEC_IMAGE"] != "root/py:latest" {
		t.Errorf("demo.env has %q", demo)
	}
	if admin["OPENDSEC_TOKEN"] == demo["OPENDSEC_TOKEN"] || !strings.HasPrefix(demo["OPENDSEC_TOKEN"], "ods_") {
		t.Error("the two callers have no token each")
	}
	for _, dir := range []string{s.Ops, s.State} {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := d.Info()
			// The certificate is for all to see; the directory above it is not.
			if err == nil && info.Mode().Perm()&0o077 != 0 && filepath.Base(path) != "ca.pem" && filepath.Base(path) != "ca" {
				t.Errorf("%s has the mode %v", path, info.Mode())
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestInitAgainKeepsAll(t *testing.T) {
	s := setup(t)
	mustInit(t, s)
	before := contents(t, s.Ops)
	for _, again := range []Setup{s, {Ops: s.Ops}, {Ops: s.Ops, State: s.State + "/"}} {
		mustInit(t, again)
		if diff := cmp.Diff(before, contents(t, s.Ops)); diff != "" {
			t.Fatalf("%+v changed:\n%s", again, diff)
		}
	}
}

func TestInitKeepsWhatItsAdminWrote(t *testing.T) {
	s := setup(t)
	mustInit(t, s)
	demo := filepath.Join(s.Ops, "demo.env")
	text := strings.Replace(contents(t, s.Ops)["/demo.env"], "root/py:latest", `"root/my image"`, 1)
	text = strings.Replace(text, "OPENDSEC_PROJECT=root/demo", "OPENDSEC_PROJECT=root/demo/mine", 1)
	text = "# for x=y see the wiki\n" + text + "export E2B_API_KEY=e2b_abc\n"
	if err := os.WriteFile(demo, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	config := configFile(s.Ops, mtls.RoleEdge)
	b, err := os.ReadFile(config)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(config, bytes.Replace(b, []byte("{"), []byte(`{"ready_slots": 3,`), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	in := mustInit(t, Setup{Ops: s.Ops})
	if in.Edge.ReadySlots != 3 {
		t.Errorf("ready_slots is %d", in.Edge.ReadySlots)
	}
	if diff := cmp.Diff(text, contents(t, s.Ops)["/demo.env"]); diff != "" {
		t.Errorf("demo.env changed:\n%s", diff)
	}
	if got := vars(t, demo)["OPENDSEC_IMAGE"]; got != "root/my image" {
		t.Errorf("OPENDSEC_IMAGE is read as %q", got)
	}
}

func TestInitChangesTheAddress(t *testing.T) {
	s := setup(t)
	before := vars(t, mustInit(t, s).EnvFile())
	in := mustInit(t, Setup{Ops: s.Ops, Listen: "0.0.0.0:17302"})
	after := vars(t, in.EnvFile())
	if after["OPENDSEC_ADDR"] != "https://127.0.0.1:17302" || after["OPENDSEC_TOKEN"] != before["OPENDSEC_TOKEN"] {
		t.Errorf("env has %s", after["OPENDSEC_ADDR"])
	}
	if got := vars(t, filepath.Join(s.Ops, "demo.env"))["OPENDSEC_ADDR"]; got != after["OPENDSEC_ADDR"] {
		t.Errorf("demo.env has %s", got)
	}
	got := []string{in.APIServer.Listen, in.IAM.Listen, in.APIServer.IAM, in.Edge.Listen, in.Watcher.Nodes[0].Address}
	want := []string{"0.0.0.0:17302", "127.0.0.1:17303", "127.0.0.1:17303", "127.0.0.1:17304", "127.0.0.1:17304"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("addresses:\n%s", diff)
	}
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	if err := certificate(t, in).VerifyHostname(host); err != nil {
		t.Errorf("others cannot trust it: %v", err)
	}
	loaded, err := Load(s.Ops)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(in, loaded); diff != "" {
		t.Errorf("what was saved is not what runs:\n%s", diff)
	}
}

func TestInitLeavesInnerAddressesThatWereChosen(t *testing.T) {
	s := setup(t)
	in := mustInit(t, s)
	in.IAM.Listen, in.APIServer.IAM = "127.0.0.1:9", "127.0.0.1:9"
	if err := in.save(); err != nil {
		t.Fatal(err)
	}
	in = mustInit(t, Setup{Ops: s.Ops, Listen: ":17400"})
	if in.IAM.Listen != "127.0.0.1:9" || in.Edge.Listen != "127.0.0.1:17402" {
		t.Errorf("iam listens on %s, the edge on %s", in.IAM.Listen, in.Edge.Listen)
	}
	if err := certificate(t, in).VerifyHostname("127.0.0.1"); err != nil {
		t.Error(err)
	}
}

// certificate returns what the API shows its callers.
func certificate(t *testing.T, in *Installation) *x509.Certificate {
	t.Helper()
	path := filepath.Join(in.APIServer.PKI, mtls.RoleAPIServer+".pem")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tls.X509KeyPair(b, b); err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(b)
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestInitRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Setup)
		want   string
	}{
		"no configuration directory": {func(s *Setup) { s.Ops = "" }, `directory "": give an absolute path`},
		"relative configuration":     {func(s *Setup) { s.Ops = "ops" }, `directory "ops": give an absolute path`},
		"relative state":             {func(s *Setup) { s.State = "./state" }, `directory "./state": give an absolute path`},
		"relative programs":          {func(s *Setup) { s.Programs = "bin" }, `directory "bin": give an absolute path`},
		"no port":                    {func(s *Setup) { s.Listen = "127.0.0.1" }, `"127.0.0.1": want host:port`},
		"port 0":                     {func(s *Setup) { s.Listen = ":0" }, `":0": the port must be 1 to 65500`},
		"port too high":              {func(s *Setup) { s.Listen = ":65535" }, `":65535": the port must be 1 to 65500`},
		"port by name":               {func(s *Setup) { s.Listen = ":https" }, `the port must be 1 to 65500`},
	} {
		t.Run(name, func(t *testing.T) {
			s := setup(t)
			first := s
			c.change(&s)
			for _, there := range []bool{false, true} {
				if there {
					mustInit(t, first)
				}
				before := 0
				if there {
					before = len(contents(t, first.Ops))
				}
				_, err := Init(t.Context(), s)
				if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
					t.Errorf("with an installation there (%v): %v; want %s", there, err, c.want)
				}
				if there && len(contents(t, first.Ops)) != before {
					t.Error("it left something")
				}
			}
		})
	}
}

func TestInitRefusesToMoveTheState(t *testing.T) {
	s := setup(t)
	mustInit(t, s)
	moved := s
	moved.State += "2"
	if _, err := Init(t.Context(), moved); err == nil || !strings.Contains(err.Error(), "cannot be moved") || !strings.Contains(err.Error(), s.State) {
		t.Errorf("got %v", err)
	}
	if _, err := os.Stat(moved.State); err == nil {
		t.Error("it made the other directory")
	}
}

func TestBrokenConfiguration(t *testing.T) {
	for name, c := range map[string]struct {
		file, text string // "" removes the file
		want       string
	}{
		"no JSON":     {"edge.json", "{\n]", "line 2"},
		"empty":       {"iam.json", "\n", "EOF"},
		"unknown key": {"watcher.json", `{"secret": "ods_abc"}`, `unknown field "secret"`},
		"a fault":     {"apiserver.json", `{"pki": "/x", "listen": "here", "database": "sqlite:/x", "iam": "127.0.0.1:1"}`, `listen: want host:port, not "here"`},
		"missing":     {"iam.json", "", "is missing, though other files"},
	} {
		t.Run(name, func(t *testing.T) {
			s := setup(t)
			in := mustInit(t, s)
			path := filepath.Join(s.Ops, c.file)
			err := os.Remove(path)
			if c.text != "" {
				err = os.WriteFile(path, []byte(c.text), 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
			token := vars(t, in.EnvFile())["OPENDSEC_TOKEN"]
			_, ierr := Init(t.Context(), s)
			_, lerr := Load(s.Ops)
			for _, err := range []error{ierr, lerr} {
				if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), path) {
					t.Errorf("got %v; want %s and %s", err, c.want, path)
				}
				if err != nil && (strings.Contains(err.Error(), "ods_") || strings.Contains(err.Error(), token)) {
					t.Errorf("a secret in: %v", err)
				}
			}
		})
	}
}

// An Init that was cut short at any file is finished by the next.
func TestInitAfterACrash(t *testing.T) {
	for _, last := range []string{"/state", "/iam.json", "/edge.json", "/watcher.json"} {
		t.Run(strings.Trim(last, "/"), func(t *testing.T) {
			s := setup(t)
			mustInit(t, s)
			order := []string{"/state", "/iam.json", "/edge.json", "/watcher.json", "/apiserver.json"}
			keep := true
			for _, file := range order {
				if !keep {
					if err := os.Remove(s.Ops + file); err != nil {
						t.Fatal(err)
					}
				}
				keep = keep && file != last
			}
			again := s
			again.State = "" // it is noted
			if in := mustInit(t, again); in.StateDir() != s.State {
				t.Errorf("the state is now in %s", in.StateDir())
			}
			if _, err := Load(s.Ops); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestLoadWithoutInstallation(t *testing.T) {
	dir := t.TempDir()
	if _, err := Load(dir); err == nil || !strings.Contains(err.Error(), "there is no installation in "+dir+"; make one with: opendsec up --ops "+dir) {
		t.Errorf("got %v", err)
	}
}

func TestAdminSaysWhatIsLacking(t *testing.T) {
	in := mustInit(t, setup(t))
	if err := os.WriteFile(in.EnvFile(), []byte("export OPENDSEC_ADDR=https://127.0.0.1:1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := in.Admin(); err == nil || !strings.Contains(err.Error(), in.EnvFile()) {
		t.Errorf("got %v", err)
	}
	if err := os.Remove(in.EnvFile()); err != nil {
		t.Fatal(err)
	}
	if _, err := in.Admin(); err == nil || !strings.Contains(err.Error(), in.EnvFile()) {
		t.Errorf("got %v", err)
	}
}
